"""Versions in files of this host: checked where they lie, written where an engine's processes can read them."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from meshrl.inference.embedded.staging import tensor_bytes
from meshrl.versions.files import HostBytes, Spool, empty_bytes, map_files
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import build_manifest, entries_of, plan_tensors
from meshrl.wire.types import FileEntry, Manifest, Transport
from small_disk import fill, mounted
from unnamed_files import unnamed_files


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "b": torch.randn(33, 7).bfloat16(),
        "a": torch.randn(130, 17),
        "mask": torch.ones(5, dtype=torch.bool),
        "none": torch.zeros(0, 3),
    }


def packed(state: dict[str, torch.Tensor], files: tuple[FileEntry, ...] = ()) -> tuple[Manifest, bytes]:
    plans = plan_tensors((name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in state.items())
    stream = b"".join(bytes(tensor_bytes(state[plan.name])) for plan in plans)
    tensors, chunks = entries_of(memoryview(stream), plans, 4096)
    transport = Transport.FILESYSTEM if files else Transport.STREAM
    return build_manifest(
        run_id="run", epoch=1, version=3, transport=transport, tensors=tensors, chunks=chunks, files=files
    ), stream


def written(folder: Path, cuts: tuple[int, ...]) -> tuple[Manifest, tuple[FileEntry, ...]]:
    """The stream in several files, each behind a header of its own."""
    _, stream = packed(weights())
    files = []
    for start, end in zip((0, *cuts), (*cuts, len(stream)), strict=True):
        path = folder / f"part{start}"
        path.write_bytes(b"h" * 64 + stream[start:end])
        files.append(FileEntry(path=str(path), offset=start, num_bytes=end - start))
    return packed(weights(), tuple(files))[0], tuple(files)


def holds(held: HostBytes, manifest: Manifest) -> bool:
    tensors, state = held.tensors(manifest), weights()
    return tensors.keys() == state.keys() and all(torch.equal(tensors[name], state[name]) for name in state)


@pytest.mark.parametrize("cuts", [(), (130 * 17 * 4,), (64, 5000)])
def test_files_are_mapped_and_checked_tensor_by_tensor(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    manifest, files = written(tmp_path, cuts)
    held = map_files(files)
    assert held.wrong_tensor(manifest, threading.Event()) is None
    assert holds(held, manifest)
    assert held.files == tuple(Path(file.path) for file in files)
    held.release()
    assert all(path.exists() for path in held.files)  # they are the publisher's


def test_one_file_is_never_copied(tmp_path: Path) -> None:
    manifest, files = written(tmp_path, ())
    held = map_files(files)
    (_, mapped), entry = held.parts[0], manifest.tensors[0]
    assert np.shares_memory(held.of(entry), mapped)
    assert held.tensors(manifest)[entry.name].data_ptr() == held.of(entry).ctypes.data


def test_damaged_tensor_is_named(tmp_path: Path) -> None:
    manifest, files = written(tmp_path, ())
    with Path(files[0].path).open("r+b") as file:
        file.seek(64 + 130 * 17 * 4 + 2)
        file.write(b"\x7f")
    assert map_files(files).wrong_tensor(manifest, threading.Event()) == "b"


def test_short_and_missing_files_are_errors(tmp_path: Path) -> None:
    _, files = written(tmp_path, ())
    Path(files[0].path).write_bytes(b"short")
    with pytest.raises(OSError, match="fewer than"):
        map_files(files)
    Path(files[0].path).unlink()
    with pytest.raises(FileNotFoundError):
        map_files(files)


def test_spooled_version_is_a_safetensors_file_until_it_is_released(tmp_path: Path) -> None:
    manifest, stream = packed(weights())
    held = Spool(tmp_path).room_for(manifest)
    held.parts[0][1][:] = np.frombuffer(stream, np.uint8)
    assert held.wrong_tensor(manifest, threading.Event()) is None
    (file,) = held.files
    assert file.stat().st_mode & 0o777 == 0o600
    stored = load_file(file)
    assert all(torch.equal(stored[name], tensor) for name, tensor in weights().items())
    kept = held.tensors(manifest)
    assert list(tmp_path.iterdir()) == []  # it has no name, so that nothing is left of a process that was killed
    held.release()
    held.release()
    assert not file.exists()
    assert torch.equal(kept["a"], weights()["a"])


def is_open(room: HostBytes) -> bool:
    assert room.own is not None
    return not room.own.closed


def test_room_is_kept_from_version_to_version_while_those_in_full_of_one_shape_follow_each_other(
    tmp_path: Path,
) -> None:
    spool, (manifest, _), (other, _) = Spool(tmp_path), packed(weights()), packed({"b": torch.ones(3)})

    def staged(version: Manifest) -> HostBytes:
        room = spool.room_for(version, for_writes=True)
        assert is_open(room)
        spool.keep(room)
        return room

    first = staged(manifest)
    assert not is_open(first)  # a delta may be next, and the memory is the host's
    second = staged(manifest)
    assert staged(manifest) is second
    assert staged(manifest) is second
    assert staged(other) is not second
    assert not is_open(second)
    third = staged(other)
    assert is_open(third)
    delta = spool.write(4, np.ones(10, np.uint8))
    assert not is_open(third)
    delta.release()
    assert not is_open(staged(other))


def test_no_room_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    manifest, _ = packed(weights())
    with mounted(tmp_path / "disk") as disk:
        spool = Spool(disk)
        filler = fill(disk)
        with pytest.raises(MeshError, match="No space left on device; free some space there") as caught:
            spool.room_for(manifest)
        assert caught.value.reason is Reason.OVERLOADED
        filler.unlink()
        assert unnamed_files(disk) == set()
        room = spool.room_for(manifest)
        assert room.files[0].exists()
        room.release()


def test_publishers_own_safetensors_file_is_read_as_it_is(tmp_path: Path) -> None:
    state = {"w": torch.randn(64, 3)}
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    file = FileEntry(path=str(path), offset=0, num_bytes=64 * 3 * 4)
    manifest, _ = packed(state, (file,))
    assert torch.equal(map_files((file,)).tensors(manifest)["w"], state["w"])
    assert len(empty_bytes(manifest).of(manifest.tensors[0])) == 768
