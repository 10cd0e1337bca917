"""The bytes of a version, some of which are here: in memory or in a file, whatever order they come in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from meshrl.versions import version_bytes
from meshrl.versions.files import Spool
from meshrl.versions.version_bytes import VersionBytes, chunk_of
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import build_manifest, entries_of, plan_tensors
from meshrl.wire.types import Manifest, Transport

CHUNK = 4096
DATA = np.random.default_rng(0).integers(0, 256, 3 * CHUNK, dtype=np.uint8)


def made() -> Manifest:
    plans = plan_tensors([("w", "uint8", (len(DATA),))])
    tensors, chunks = entries_of(memoryview(DATA), plans, CHUNK)
    return build_manifest(run_id="r", epoch=1, version=3, transport=Transport.STREAM, tensors=tensors, chunks=chunks)


def in_memory(folder: Path) -> VersionBytes:
    return VersionBytes(made(), memory=np.zeros(len(DATA), dtype=np.uint8))


def in_file(folder: Path) -> VersionBytes:
    (folder / "payload").write_bytes(bytes(len(DATA)))
    return VersionBytes(made(), folder=folder)


def in_several_files(folder: Path) -> VersionBytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(version_bytes, "PART_BYTES", CHUNK + CHUNK // 2)
        held = VersionBytes(made(), folder=folder)
    for file in held.files:
        Path(file.path).write_bytes(bytes(file.num_bytes))
    assert [(Path(file.path).name, file.num_bytes) for file in held.files] == [
        ("payload-00000", 2 * CHUNK),
        ("payload-00001", CHUNK),
    ]
    return held


@contextmanager
def in_mapped_file(folder: Path) -> Iterator[VersionBytes]:
    room = Spool(folder).room_for(made(), for_writes=True)
    (file,) = room.files
    assert os.stat(file).st_blocks * 512 <= CHUNK + 4096  # nothing but its header was written
    yield VersionBytes(made(), file=file, memory=room.parts[0][1])
    room.release()


@pytest.fixture(params=[in_memory, in_file, in_several_files, in_mapped_file])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VersionBytes]:
    made_so = request.param(tmp_path)
    with nullcontext(made_so) if isinstance(made_so, VersionBytes) else made_so as held:
        yield held


def test_bytes_come_in_any_order_and_a_chunk_is_here_once_all_of_it_is(held: VersionBytes) -> None:
    held.put(CHUNK + 100, DATA[CHUNK + 100 : 2 * CHUNK])
    held.put(0, DATA[:CHUNK])
    held.complete(0)
    assert (held.missing, held.missing_offsets()) == ({1, 2}, (CHUNK, 2 * CHUNK))
    assert (held.here_to(10, len(DATA)), held.here_to(CHUNK, len(DATA))) == (CHUNK, CHUNK)
    held.put(CHUNK, DATA[CHUNK : CHUNK + 100])
    held.complete(1)
    assert held.here_to(0, len(DATA)) == 2 * CHUNK
    with pytest.raises(MeshError, match="1 of 3 chunks are missing, at 8192; send them"):
        held.verify("digests")
    held.write(chunk_of(2 * CHUNK, DATA[2 * CHUNK :]))
    held.verify("digests")
    assert (held.missing, held.here_to(0, len(DATA))) == (set(), len(DATA))


@pytest.mark.parametrize("length", [0, 1, 4095, 2**21 + 3])
def test_checksums_that_leave_the_interpreter_to_others_are_those_of_google_crc32c(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    assert version_bytes._crc32c is not google_crc32c.value
    assert chunk_of(0, data).crc32c == chunk_of(0, data.tobytes()).crc32c == google_crc32c.value(data.tobytes())


def test_a_chunk_that_is_not_that_of_the_manifest_stays_missing(held: VersionBytes) -> None:
    held.put(0, DATA[:CHUNK] ^ 1)
    with pytest.raises(MeshError, match="the chunk at 0 of version 3 is not the one in its manifest") as caught:
        held.complete(0)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    held.put(0, DATA[:CHUNK])
    held.complete(0)
    assert held.missing == {1, 2}


def test_what_is_here_is_read_and_is_not_replaced_by_a_wrong_upload(tmp_path: Path) -> None:
    held = in_file(tmp_path)
    for offset in range(0, len(DATA), CHUNK):
        held.write(chunk_of(offset, DATA[offset : offset + CHUNK]))
    with pytest.raises(MeshError, match="is not the one in its manifest"):
        held.write(chunk_of(0, DATA[:CHUNK] ^ 1))
    pieces = list(held.read(10, len(DATA) - 5, 1000))
    assert b"".join(bytes(piece.data) for piece in pieces) == DATA[10:-5].tobytes()
    (tmp_path / "payload").write_bytes(bytes(len(DATA)))
    with pytest.raises(MeshError, match="version 3 changed at rest: the chunk at byte 4096"):
        list(held.read(CHUNK, 2 * CHUNK, CHUNK))


def test_what_has_just_come_is_sent_on_without_the_file_and_from_the_file_once_all_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = in_file(tmp_path)
    for offset in (0, CHUNK):
        held.write(chunk_of(offset, DATA[offset : offset + CHUNK]))
    (tmp_path / "payload").write_bytes(bytes(len(DATA)))  # nobody looks there
    for part in (slice(0, 2 * CHUNK), slice(100, CHUNK + 7)):
        assert b"".join(bytes(piece.data) for piece in held.read(part.start, part.stop, CHUNK)) == DATA[part].tobytes()
    monkeypatch.setattr(version_bytes, "RECENT_BYTES", 0)
    held.write(chunk_of(2 * CHUNK, DATA[2 * CHUNK :]))
    assert len(list(held.read(2 * CHUNK, len(DATA), CHUNK))) == 1
    with pytest.raises(MeshError, match="the chunk at byte 0"):
        list(held.read(0, CHUNK, CHUNK))


def test_bytes_are_waited_for_until_they_come_or_nothing_more_does() -> None:
    held = in_memory(Path())
    held.write(chunk_of(CHUNK, DATA[CHUNK : 2 * CHUNK]))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(held.wait_for, CHUNK + 1)
        held.write(chunk_of(0, DATA[:CHUNK]))
        waiting.result()
        held.wait_for(2 * CHUNK)
        waiting = thread.submit(held.wait_for, 2 * CHUNK + 1)
        held.give_up()
        with pytest.raises(MeshError, match="the rest of version 3 did not come"):
            waiting.result()


def test_a_later_start_finds_the_chunks_that_the_file_has(tmp_path: Path) -> None:
    in_file(tmp_path).write(chunk_of(CHUNK, DATA[CHUNK : 2 * CHUNK]))
    again = VersionBytes(made(), folder=tmp_path)
    again.find()
    assert again.missing == {0, 2}
