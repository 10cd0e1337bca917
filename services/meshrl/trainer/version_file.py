"""The file of a version, written and hashed in shares: by the ranks that have its rows, each with several threads.

A share's bytes are written where they belong in the stream; once all are there, every rank hashes some of the tensors
and some of the chunks from the page cache. The file is renamed when its manifest is known, the manifest after it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from meshrl.wire.manifest import TensorPlan, plan_chunks
from meshrl.wire.manifest_file import manifest_path, payload_name, safetensors_header, to_json
from meshrl.wire.types import ChunkEntry, Manifest, TensorEntry

SLICE_BYTES = 32 * 2**20  # of one write; a multiple of the page size
WIDE_BYTES = 64 * 2**20  # tensors from this size on are hashed by several threads at once

Item = TypeVar("Item")
Result = TypeVar("Result")


class VersionFile:
    """One version's file in the making, of tensors laid out by `plan_tensors`."""

    def __init__(
        self,
        folder: Path,
        *,
        version: int,
        epoch: int,
        plans: Sequence[TensorPlan],
        chunk_bytes: int,
        threads: ThreadPoolExecutor,
        num_threads: int,
    ) -> None:
        self.path = folder / f"step_{version}" / payload_name(epoch)
        self._temporary = self.path.with_suffix(".tmp")
        self._plans = tuple(plans)
        self.num_bytes = sum(plan.num_bytes for plan in plans)
        self._chunks = plan_chunks(self.num_bytes, chunk_bytes)
        self._header = safetensors_header(plans, {"format": "pt"})
        self._threads, self._num_threads = threads, num_threads

    def begin(self) -> None:
        """Makes the file with its header, at its full size; by one rank, before any share."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary.unlink(missing_ok=True)
        with self._temporary.open("wb") as file:
            file.write(self._header)
            file.truncate(len(self._header) + self.num_bytes)

    def write(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Writes (offset in the stream, bytes) of a share. Raises OSError, such as for a full disk."""
        fd = os.open(self._temporary, os.O_WRONLY | os.O_CLOEXEC)
        skip = len(self._header)

        def put(piece: tuple[int, memoryview]) -> None:
            at, data = piece
            while data:
                written = os.pwrite(fd, data, skip + at)
                at, data = at + written, data[written:]

        try:
            self._each(put, _slices(pieces))
        finally:
            os.close(fd)

    def hash(self, share: int, shares: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """BLAKE3 of a share's tensors and chunks by index, read back from the file."""
        sizes = [plan.num_bytes for plan in self._plans]
        tensors = _share(sizes, share, shares)
        first, last = (len(self._chunks) * edge // shares for edge in (share, share + 1))
        with self._temporary.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            whole = memoryview(mapped)
            payload = whole[len(self._header) :]

            def digest(span: tuple[int, int]) -> bytes:
                at, length = span
                wide = self._num_threads if length >= WIDE_BYTES else 1
                with payload[at : at + length] as part:
                    return blake3(part, max_threads=wide).digest()

            spans = [(self._plans[index].offset, sizes[index]) for index in tensors]
            digests = self._each(digest, [*spans, *self._chunks[first:last]])
            payload.release()
            whole.release()
        return dict(zip(tensors, digests, strict=False)), dict(enumerate(digests[len(tensors) :], first))

    def entries(
        self, tensors: dict[int, bytes], chunks: dict[int, bytes]
    ) -> tuple[tuple[TensorEntry, ...], tuple[ChunkEntry, ...]]:
        """What the manifest lists, from the digests of all shares."""
        return (
            tuple(entry(plan, tensors[index]) for index, plan in enumerate(self._plans)),
            tuple(
                ChunkEntry(offset=offset, length=length, digest=chunks[index])
                for index, (offset, length) in enumerate(self._chunks)
            ),
        )

    def finish(self, manifest: Manifest) -> None:
        """Gives the file its name, then its manifest."""
        self._temporary.replace(self.path)
        described = manifest_path(self.path)
        temporary = described.with_suffix(".json.tmp")
        temporary.write_bytes(to_json(manifest))
        temporary.replace(described)

    def _each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        if self._num_threads == 1 or len(items) < 2:
            return [work(item) for item in items]
        futures = [self._threads.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:  # after a failure nobody may use the file any more
                if not future.cancel():
                    future.exception()


def entry(plan: TensorPlan, digest: bytes = b"") -> TensorEntry:
    """What a manifest says of a tensor."""
    return TensorEntry(
        name=plan.name,
        dtype=plan.dtype,
        shape=plan.shape,
        offset=plan.offset,
        num_bytes=plan.num_bytes,
        digest=digest,
    )


def _slices(pieces: Iterable[tuple[int, memoryview]]) -> list[tuple[int, memoryview]]:
    return [
        (offset + at, data[at : at + SLICE_BYTES]) for offset, data in pieces for at in range(0, len(data), SLICE_BYTES)
    ]


def _share(sizes: Sequence[int], share: int, shares: int) -> list[int]:
    """Indices of one of `shares` parts of about equal size; the same division on every rank."""
    loads, found = [0] * shares, []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[index]
        if lightest == share:
            found.append(index)
    return found
