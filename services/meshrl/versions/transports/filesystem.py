"""The filesystem transport: a version's bytes are in files that the hub and the engines can read.

Rank 0 creates the files; each sender rank writes its rows into them and hashes a share of the whole. Rank 0 renames
them and writes the manifest last.

A large version is cut into several files at the borders of tensors, since a file system lets one writer at a time into
a file. Digests are those of the page cache.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from meshrl.core.durable import write_at
from meshrl.versions.progress import Progress
from meshrl.versions.transports.base import Answer, Prepared, PublishCall, VersionCall
from meshrl.versions.transports.rows import RowShare, RowTransport, in_slices, in_threads
from meshrl.wire.manifest import SUM128, plan_chunks
from meshrl.wire.manifest_file import manifest_path, payload_names, safetensors_header, to_json
from meshrl.wire.types import ChunkEntry, FileEntry, Manifest, TensorEntry, Transport, capabilities

WIDE_BYTES = 64 * 2**20  # tensors from this size on are hashed by several threads at once
CREATE_ATTEMPTS = 10
FILE_BYTES = 256 * 2**20  # no file is cut off below this size


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A file: bytes [offset, offset + num_bytes) of the stream behind a header."""

    path: Path
    offset: int
    num_bytes: int
    header: bytes

    @property
    def temporary(self) -> Path:
        return self.path.with_suffix(".tmp")


class VersionFiles:
    def __init__(
        self,
        folder: Path,
        *,
        version: int,
        epoch: int,
        tensors: Sequence[TensorEntry],
        chunk_bytes: int,
        threads: ThreadPoolExecutor,
        num_threads: int,
        progress: Progress,
    ) -> None:
        """There are at most `num_threads` files; the same number on all ranks."""
        self._progress = progress
        self._tensors = tuple(tensors)
        self.num_bytes = sum(tensor.num_bytes for tensor in tensors)
        self._chunks = plan_chunks(self.num_bytes, chunk_bytes)
        self._parts = _parts(folder / f"step_{version}", epoch, self._tensors, num_threads)
        self._starts = [part.offset for part in self._parts]
        self._threads, self._num_threads = threads, num_threads

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        return tuple(
            FileEntry(path=str(part.path), offset=part.offset, num_bytes=part.num_bytes) for part in self._parts
        )

    def begin(self) -> None:
        """Creates the files with their headers, at full size, before any rank writes."""
        for part in self._parts:
            part.temporary.unlink(missing_ok=True)
            with _create(part.temporary) as file:
                file.write(part.header)
                file.truncate(len(part.header) + part.num_bytes)

    def write(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Writes (offset in the stream, bytes) of a share. Raises OSError."""
        by_file: list[list[tuple[int, memoryview]]] = [[] for _ in self._parts]
        for offset, data in pieces:
            for index, at, length in self._spans(offset, len(data)):
                start = self._parts[index].offset + at - offset
                by_file[index].append((at, data[start : start + length]))
        with ExitStack() as stack:
            fds = [os.open(part.temporary, os.O_WRONLY | os.O_CLOEXEC) for part in self._parts]
            for fd in fds:
                stack.callback(os.close, fd)

            def put(piece: tuple[int, int, memoryview]) -> None:
                index, at, data = piece
                write_at(fds[index], data, len(self._parts[index].header) + at)
                self._progress.moved()

            slices = [[(index, *piece) for piece in in_slices(found)] for index, found in enumerate(by_file)]
            # One of each file after the other: threads that take neighbours then write to different files.
            in_turn = [piece for turn in zip_longest(*slices) for piece in turn if piece is not None]
            in_threads(self._threads, put, in_turn)

    def hash(self, share: int, shares: int, *, with_tensors: bool = True) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """BLAKE3 of a share's tensors and chunks by index, read back from the files."""
        sizes = [plan.num_bytes for plan in self._tensors]
        tensors = _share(sizes, share, shares) if with_tensors else []
        first, last = (len(self._chunks) * edge // shares for edge in (share, share + 1))
        with ExitStack() as stack:
            payloads = [stack.enter_context(_mapped(part)) for part in self._parts]

            def digest(span: tuple[int, int]) -> bytes:
                hasher = blake3(max_threads=self._num_threads if span[1] >= WIDE_BYTES else 1)
                for index, at, length in self._spans(*span):
                    with payloads[index][at : at + length] as piece:
                        hasher.update(piece)
                    self._progress.moved()
                return hasher.digest()

            spans = [(self._tensors[index].offset, sizes[index]) for index in tensors]
            digests = in_threads(self._threads, digest, [*spans, *self._chunks[first:last]])
        return dict(zip(tensors, digests, strict=False)), dict(enumerate(digests[len(tensors) :], first))

    def listed(self, chunks: dict[int, bytes]) -> tuple[ChunkEntry, ...]:
        return tuple(
            ChunkEntry(offset=offset, length=length, digest=chunks[index])
            for index, (offset, length) in enumerate(self._chunks)
        )

    def finish(self, manifest: Manifest) -> None:
        """Renames the files, then writes and renames the manifest."""
        for part in self._parts:
            part.temporary.replace(part.path)
        described = manifest_path(self._parts[0].path)
        temporary = described.with_suffix(".json.tmp")
        temporary.write_bytes(to_json(manifest))
        temporary.replace(described)

    def _spans(self, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
        """(file, position in its payload, bytes) of a run of the stream."""
        end = offset + length
        index = bisect_right(self._starts, offset) - 1
        while offset < end:
            part = self._parts[index]
            stop = min(end, part.offset + part.num_bytes)
            if offset < stop:
                yield index, offset - part.offset, stop - offset
                offset = stop
            index += 1


def _create(path: Path) -> BinaryIO:
    """Opens a new file. Its folder may go at any moment: the hub removes those that deleted versions leave empty."""
    for _ in range(CREATE_ATTEMPTS - 1):
        with suppress(FileNotFoundError, FileExistsError):  # the latter from mkdir, when it is gone at the second look
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("wb")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")


def _parts(folder: Path, epoch: int, plans: Sequence[TensorEntry], most: int) -> list[_Part]:
    total = sum(plan.num_bytes for plan in plans)
    count = max(1, min(most, total // FILE_BYTES))
    runs: list[list[TensorEntry]] = [[]]
    for plan in plans:
        if plan.num_bytes and plan.offset * count >= total * len(runs):
            runs.append([])
        runs[-1].append(plan)
    parts = []
    for name, run in zip(payload_names(epoch, len(runs)), runs, strict=True):
        offset = run[0].offset if run else 0
        own = [replace(plan, offset=plan.offset - offset) for plan in run]
        parts.append(
            _Part(
                path=folder / name,
                offset=offset,
                num_bytes=sum(plan.num_bytes for plan in run),
                header=safetensors_header(own, {"format": "pt"}),
            )
        )
    return parts


@contextmanager
def _mapped(part: _Part) -> Iterator[memoryview]:
    with (
        part.temporary.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
        memoryview(mapping) as whole,
        whole[len(part.header) :] as payload,
    ):
        yield payload


def _share(sizes: Sequence[int], share: int, shares: int) -> list[int]:
    loads, found = [0] * shares, []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[index]
        if lightest == share:
            found.append(index)
    return found


@dataclass(frozen=True, kw_only=True)
class WriteFiles(VersionCall):
    """Write the rank's rows of a version into its files."""

    chunk_bytes: int


@dataclass(frozen=True, kw_only=True)
class HashFiles(VersionCall):
    """Hash the rank's share of what all have written: its chunks and, unless they have digests, its tensors."""

    chunk_bytes: int
    tensors: bool


class FileShare(RowShare):
    @property
    def handlers(self) -> Mapping[type[PublishCall], Callable[[Any], Answer]]:
        return {**super().handlers, WriteFiles: self._write_files, HashFiles: self._hash_files}

    def files(self, version: int, chunk_bytes: int) -> VersionFiles:
        return VersionFiles(
            self.folder,
            version=version,
            epoch=self.epoch,
            tensors=self.tensors_of(version),
            chunk_bytes=chunk_bytes,
            threads=self._threads,
            num_threads=self.num_threads,
            progress=self.progress,
        )

    def _write_files(self, call: WriteFiles) -> Answer:
        with self._snapshot(call.version) as snapshot:
            self.files(call.version, call.chunk_bytes).write(self.pieces_of(snapshot))
        return {}

    def _hash_files(self, call: HashFiles) -> Answer:
        files = self.files(call.version, call.chunk_bytes)
        tensors, chunks = files.hash(self.share, self.num_shares, with_tensors=call.tensors)
        return {
            "tensors": {str(index): digest.hex() for index, digest in tensors.items()},
            "chunks": {str(index): digest.hex() for index, digest in chunks.items()},
        }


class FilesystemTransport(RowTransport[FileShare]):
    deltas_need = (capabilities.FILE_DELTAS,)

    def _full(self, version: int) -> Prepared:
        size, files = self._chunk_bytes, self._share.files(version, self._chunk_bytes)
        files.begin()
        self._ranks.call(WriteFiles(version=version, chunk_bytes=size), stall_s=self._stall_s)
        hashing = HashFiles(version=version, chunk_bytes=size, tensors=self._rule is None)
        answers = self._ranks.call(hashing, stall_s=self._stall_s)
        chunks = files.listed(_joined("chunks", answers))
        if self._rule is None:
            found = _joined("tensors", answers)
            tensors, algorithm = tuple(replace(plan, digest=found[i]) for i, plan in enumerate(self._tensors)), ""
        else:
            tensors, algorithm = self._digested, SUM128
        manifest = self._line.manifest(
            version, Transport.FILESYSTEM, tensors, chunks, files=files.entries, digest_algorithm=algorithm
        )
        files.finish(manifest)
        return Prepared(manifest=manifest, in_full=manifest)


def _joined(table: str, answers: Sequence[Answer]) -> dict[int, bytes]:
    return {int(index): bytes.fromhex(digest) for answer in answers for index, digest in answer[table].items()}
