"""The hub's store: chunks on a small disk, and files that are gone when their version is retired."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from meshrl.versions import version_bytes
from meshrl.versions.files import Spool
from meshrl.versions.store import VersionStore
from meshrl.versions.version_bytes import VersionBytes
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import artifact_id, build_manifest, entries_of, plan_tensors
from meshrl.wire.types import Chunk, Manifest, Transport
from small_disk import fill, mounted

CHUNK_BYTES = 3 * 4096
DATA = np.random.default_rng(0).integers(0, 256, 2 * CHUNK_BYTES, np.uint8).tobytes()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", mebibytes=4) as folder:
        yield folder


def made(version: int = 3, content: bytes = DATA) -> Manifest:
    plans = plan_tensors([("w", "uint8", (len(content),))])
    tensors, chunks = entries_of(memoryview(content), plans, CHUNK_BYTES)
    return build_manifest(
        run_id="r", epoch=1, version=version, transport=Transport.STREAM, tensors=tensors, chunks=chunks
    )  # fmt: skip


def chunk(offset: int, content: bytes = DATA) -> Chunk:
    data = content[offset : offset + CHUNK_BYTES]
    return Chunk(offset=offset, data=data, crc32c=google_crc32c.value(data))


def opened(store: VersionStore, version: int, content: bytes) -> str:
    manifest = made(version, content)
    artifact = artifact_id(manifest)
    store.open(artifact, manifest)
    return artifact


def filled(store: VersionStore, version: int, content: bytes = DATA) -> str:
    artifact = opened(store, version, content)
    for offset in range(0, len(content), CHUNK_BYTES):
        store.held(artifact).write(chunk(offset, content))
    return artifact


def read(store: VersionStore, artifact: str) -> bytes:
    return b"".join(bytes(piece.data) for piece in store.read(artifact, 0, 2**30, CHUNK_BYTES))


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("payload-*")}


def test_a_chunk_that_was_written_in_part_has_not_arrived(disk: Path) -> None:
    store, manifest = VersionStore(disk), made()
    artifact = artifact_id(manifest)
    store.open(artifact, manifest)
    filler = fill(disk)
    with filler.open("r+b") as file:
        file.truncate(filler.stat().st_size - CHUNK_BYTES - 4096)  # room for a chunk and a third
    store.held(artifact).write(chunk(0))
    with pytest.raises(MeshError) as caught:
        store.held(artifact).write(chunk(CHUNK_BYTES))
    assert caught.value.reason is Reason.OVERLOADED
    assert store.held(artifact).missing_offsets() == (CHUNK_BYTES,)
    filler.unlink()
    store.held(artifact).write(chunk(CHUNK_BYTES))
    assert store.held(artifact).missing_offsets() == ()
    assert b"".join(bytes(piece.data) for piece in store.read(artifact, 0, len(DATA), CHUNK_BYTES)) == DATA


def test_a_version_larger_than_the_room_is_refused_before_any_of_it_comes(disk: Path) -> None:
    store, manifest = VersionStore(disk), made()
    artifact = artifact_id(manifest)
    filler = fill(disk)
    with filler.open("r+b") as file:
        file.truncate(filler.stat().st_size - len(DATA))  # which the hub's log would not fit beside
    with pytest.raises(MeshError, match="the hub has no room for version 3") as caught:
        store.open(artifact, manifest)
    assert caught.value.reason is Reason.OVERLOADED
    filler.unlink()
    store.open(artifact, manifest)
    assert store.held(artifact).missing_offsets() == (0, CHUNK_BYTES)


@pytest.mark.parametrize("payload", [None, b""])
def test_a_hub_that_was_killed_before_a_version_had_room_takes_it_after_its_next_start(
    tmp_path: Path, payload: bytes | None
) -> None:
    manifest = made()
    artifact = artifact_id(manifest)
    VersionStore(tmp_path).open(artifact, manifest)
    (tmp_path / artifact / "payload").unlink()
    if payload is not None:
        (tmp_path / artifact / "payload").write_bytes(payload)
    store = VersionStore(tmp_path)
    store.prepare({artifact})
    store.open(artifact, manifest)
    assert store.held(artifact).missing_offsets() == (0, CHUNK_BYTES)
    for offset in (0, CHUNK_BYTES):
        store.held(artifact).write(chunk(offset))
    assert b"".join(bytes(piece.data) for piece in store.read(artifact, 0, len(DATA), CHUNK_BYTES)) == DATA


def test_a_version_in_several_files_goes_on_from_those_that_a_killed_hub_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_bytes, "PART_BYTES", CHUNK_BYTES)
    manifest = made()
    artifact = artifact_id(manifest)
    killed = VersionStore(tmp_path)
    killed.open(artifact, manifest)
    killed.held(artifact).write(chunk(CHUNK_BYTES))
    (tmp_path / artifact / "payload-00000").unlink()
    store = VersionStore(tmp_path)
    store.prepare({artifact})
    assert store.held(artifact).missing_offsets() == (0,)
    store.held(artifact).write(chunk(0))
    assert b"".join(bytes(piece.data) for piece in store.read(artifact, 0, len(DATA), CHUNK_BYTES)) == DATA
    store.delete(artifact, ())
    assert list(tmp_path.iterdir()) == []


def test_a_version_is_written_over_the_files_of_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_bytes, "PART_BYTES", CHUNK_BYTES)
    store, other = VersionStore(tmp_path), DATA[::-1]
    first, second = filled(store, 1), filled(store, 2)
    files = inodes(tmp_path / first)
    assert len(files) == 2
    store.delete(first, ())
    assert {path.name for path in tmp_path.iterdir()} == {second, "room"}
    third = opened(store, 3, other)
    assert inodes(tmp_path / third) == files
    assert store.held(third).missing_offsets() == (0, CHUNK_BYTES)
    store.held(third).write(chunk(CHUNK_BYTES, other))

    killed = VersionStore(tmp_path)  # before it had the rest, of which the file has an earlier version's
    killed.prepare({second, third})
    assert killed.held(third).missing_offsets() == (0,)
    killed.held(third).write(chunk(0, other))
    assert (read(killed, third), read(killed, second)) == (other, DATA)

    killed.delete(second, ())
    killed.delete(third, ())
    assert list(tmp_path.iterdir()) == []


def test_files_that_no_version_can_be_written_over_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_bytes, "PART_BYTES", CHUNK_BYTES)
    store = VersionStore(tmp_path)
    first, aborted = filled(store, 1), opened(store, 2, DATA)
    store.delete(aborted, ())  # a thread may still write to it
    assert {path.name for path in tmp_path.iterdir()} == {first}

    second = filled(store, 2)
    store.delete(first, ())
    assert (tmp_path / "room").exists()
    longer = filled(store, 3, DATA + DATA[:CHUNK_BYTES])
    assert {path.name for path in tmp_path.iterdir()} == {second, longer}
    store.delete(second, ())  # its like does not follow any more
    assert {path.name for path in tmp_path.iterdir()} == {longer}

    fourth = filled(store, 4, DATA + DATA[:CHUNK_BYTES])
    store.delete(longer, ())
    assert (tmp_path / "room").exists()
    VersionStore(tmp_path).prepare({fourth})
    assert {path.name for path in tmp_path.iterdir()} == {fourth}


def test_room_of_another_layout_is_freed_before_a_version_is_refused(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_bytes, "PART_BYTES", CHUNK_BYTES)
    store = VersionStore(disk)
    first, _ = filled(store, 1), filled(store, 2)
    store.delete(first, ())
    filler = fill(disk)
    with filler.open("r+b") as file:
        file.truncate(filler.stat().st_size - 2**20 - 2 * CHUNK_BYTES)
    third = filled(store, 3, DATA + DATA[:CHUNK_BYTES])
    assert read(store, third) == DATA + DATA[:CHUNK_BYTES]


def test_a_version_that_an_earlier_release_kept_in_one_file_is_read_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = made()
    artifact = artifact_id(manifest)
    earlier = VersionStore(tmp_path)
    earlier.open(artifact, manifest)
    for offset in (0, CHUNK_BYTES):
        earlier.held(artifact).write(chunk(offset))
    monkeypatch.setattr(version_bytes, "PART_BYTES", CHUNK_BYTES)
    store = VersionStore(tmp_path)
    store.prepare({artifact})
    assert store.held(artifact).missing_offsets() == ()
    assert b"".join(bytes(piece.data) for piece in store.read(artifact, 0, len(DATA), CHUNK_BYTES)) == DATA


def test_an_engine_whose_shared_memory_fills_up_refuses_a_version_and_goes_on_once_there_is_room(disk: Path) -> None:
    spool = Spool(disk)
    room = spool.room_for(made(), for_writes=True)
    held = VersionBytes(made(), file=room.files[0], memory=room.parts[0][1])
    filler = fill(disk)
    with pytest.raises(MeshError, match=f"this host has no room for version 3 in {disk}:") as caught:
        held.write(chunk(0))
    assert (caught.value.reason, held.missing) == (Reason.OVERLOADED, {0, 1})
    with pytest.raises(MeshError, match="this host has no room for version 3"):  # and no page that kills the process
        held.room(0, len(DATA))
    with pytest.raises(MeshError, match="No space left on device"):
        spool.room_for(made(), for_writes=True)
    filler.unlink()
    landed = held.room(0, CHUNK_BYTES)
    landed[:] = np.frombuffer(DATA, np.uint8)[:CHUNK_BYTES]
    held.take(held.manifest.chunks[0], landed)
    held.write(chunk(CHUNK_BYTES))
    assert room.parts[0][1].tobytes() == DATA
    room.release()


def test_files_that_went_with_their_run_are_not_missed_and_those_without_a_manifest_are_named(
    tmp_path: Path, warned: list[str]
) -> None:
    store, orphan = VersionStore(tmp_path / "spool"), tmp_path / "weights-e2.safetensors"
    store.delete("a", [str(tmp_path / "step_1" / "weights-e1.safetensors")])
    assert warned == []
    orphan.touch()
    store.delete("a", [str(orphan)])
    (line,) = warned
    assert f"{orphan} is kept: " in line
