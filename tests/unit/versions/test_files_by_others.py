"""Files that a publisher names to the hub and to engines: only regular ones are opened, others are refused at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.versions.files import map_files
from meshrl.versions.store import VersionStore
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import artifact_id, build_manifest, digest
from meshrl.wire.types import ChunkEntry, FileEntry, Manifest, TensorEntry, Transport

DATA = b"four"


def in_time(work: Callable[[], object], pipe: Path) -> object:
    """What `work` returns or raises; work that waits at the pipe is let go, and fails the test."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except (OSError, MeshError) as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60.0)
    waited = thread.is_alive()
    if waited:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        thread.join(60.0)
    assert not waited, "it waits for somebody to write into the pipe"
    return found[0]


def manifest(path: Path) -> Manifest:
    tensor = TensorEntry(name="w", dtype="uint8", shape=(4,), offset=0, num_bytes=4, digest=digest(DATA))
    return build_manifest(
        run_id="r", epoch=1, version=1, transport=Transport.FILESYSTEM, tensors=(tensor,),
        chunks=(ChunkEntry(offset=0, length=4, digest=digest(DATA)),),
        files=(FileEntry(path=str(path), offset=0, num_bytes=4),),
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path / "spool")


@pytest.mark.parametrize("verify", ["digests", "sizes"])
def test_hub_refuses_a_pipe_in_the_place_of_a_file(tmp_path: Path, store: VersionStore, verify: str) -> None:
    pipe = tmp_path / "weights-e1.safetensors"
    os.mkfifo(pipe)
    made = manifest(pipe)
    store.open(artifact_id(made), made)
    error = in_time(lambda: store.held(artifact_id(made)).verify(verify), pipe)  # type: ignore[arg-type] # one of two
    assert isinstance(error, MeshError)
    assert error.reason is Reason.CHUNKS_MISSING
    assert "is not a regular file" in error.message
    assert str(pipe) in error.message


def test_hub_refuses_a_link_to_another_file(tmp_path: Path, store: VersionStore) -> None:
    (tmp_path / "elsewhere").write_bytes(DATA)
    link = tmp_path / "weights-e1.safetensors"
    link.symlink_to(tmp_path / "elsewhere")
    made = manifest(link)
    store.open(artifact_id(made), made)
    with pytest.raises(MeshError, match="is not a regular file"):
        store.held(artifact_id(made)).verify("digests")


def test_hub_does_not_wait_at_a_pipe_in_the_place_of_a_manifest(tmp_path: Path, store: VersionStore) -> None:
    payload, pipe = tmp_path / "weights-e1.safetensors", tmp_path / "weights-e1.json"
    payload.write_bytes(DATA)
    os.mkfifo(pipe)
    assert in_time(lambda: store.delete("artifact", [str(payload)]), pipe) is None
    assert payload.read_bytes() == DATA


def test_engine_refuses_pipes_and_links(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    (tmp_path / "elsewhere").write_bytes(DATA)
    link.symlink_to(tmp_path / "elsewhere")
    for path in (pipe, link):
        error = in_time(lambda path=path: map_files(manifest(path).files), pipe)  # type: ignore[misc]  # bound now
        assert isinstance(error, OSError)
        assert "is not a regular file" in str(error)
