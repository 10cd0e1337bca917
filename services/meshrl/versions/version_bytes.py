"""The bytes of one version, of which chunks may be missing: in memory, or in files.

Uploads and downloads fill them; a hub and relays serve the present chunks while the rest comes. A chunk is present once
its BLAKE3 was right, and is checked again when it is read from a file to be sent in messages.

A hub and relays keep large versions in several files: a file takes one write at a time, however many threads have some.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from meshrl.core.durable import is_full, write_at
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.manifest import digest
from meshrl.wire.manifest_file import PayloadReader
from meshrl.wire.types import Chunk, ChunkEntry, FileEntry, Manifest, Transport

PAYLOAD = "payload"
PART_BYTES = 32 * 2**20  # of a payload in several files
RECENT_BYTES = 32 * 2**20
VERIFIERS = 8  # threads that check a version made of files
MADV_POPULATE_WRITE = 23  # of Linux since 5.14 (include/uapi/asm-generic/mman-common.h)

_LIBC = ctypes.CDLL(None)


def _unlocked_crc32c() -> Callable[[NDArray[np.uint8]], int]:
    """CRC32C without the interpreter's lock, which google_crc32c itself keeps unless it gets large `bytes`."""
    try:
        from google_crc32c import _crc32c as built  # the C extension, where it was built

        value = ctypes.CDLL(built.__file__).crc32c_value
    except (ImportError, AttributeError, OSError):  # there is no C extension, or it is linked in another way
        by_lock: Callable[[NDArray[np.uint8]], int] = google_crc32c.value
        return by_lock
    value.argtypes, value.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint32
    return lambda data: int(value(data.ctypes.data, data.nbytes))


_crc32c = _unlocked_crc32c()


def payload_files(manifest: Manifest, folder: Path) -> tuple[FileEntry, ...]:
    """The files of a streamed version in a folder of its own: `payload`, or parts of it that end where chunks do."""
    whole = folder / PAYLOAD
    if manifest.payload_bytes <= PART_BYTES or whole.exists():
        return (FileEntry(path=str(whole), offset=0, num_bytes=manifest.payload_bytes),)
    parts = groupby(manifest.chunks, key=lambda chunk: chunk.offset // PART_BYTES)
    starts = [next(chunks).offset for _, chunks in parts]
    return tuple(
        FileEntry(path=f"{whole}-{number:05}", offset=start, num_bytes=end - start)
        for number, (start, end) in enumerate(pairwise([*starts, manifest.payload_bytes]))
    )


def chunk_of(offset: int, data: bytes | memoryview | NDArray[np.uint8]) -> Chunk:
    found = np.frombuffer(data, dtype=np.uint8)
    return Chunk(offset=offset, data=data if isinstance(data, bytes) else found.data, crc32c=_crc32c(found))


def sound_bytes(chunk: Chunk) -> NDArray[np.uint8]:
    """The bytes of a chunk that arrived. Raises MeshError CHUNK_CORRUPT when they were damaged on the way."""
    data = np.frombuffer(chunk.data, dtype=np.uint8)
    if _crc32c(data) != chunk.crc32c:
        text = f"the chunk at {chunk.offset} does not match its CRC32C; send it again"
        raise MeshError(Reason.CHUNK_CORRUPT, text)
    return data


class VersionBytes:
    """`missing` has the indices of the chunks that are not here. Safe for threads; blocking where there are files."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        folder: Path | None = None,
        file: Path | None = None,
        memory: NDArray[np.uint8] | None = None,
    ) -> None:
        """Of a hub or a relay, `folder` is the version's own; else `memory` has its bytes.

        With `file`, `memory` is a mapping of its end: writes are cheaper than its page faults.
        """
        self.manifest, self._folder, self._memory = manifest, folder, memory
        self.files: Sequence[FileEntry] = ()
        if file is not None:
            self.files = (FileEntry(path=str(file), offset=0, num_bytes=manifest.payload_bytes),)
        elif folder is not None:
            in_place = manifest.transport is Transport.FILESYSTEM
            self.files = manifest.files if in_place else payload_files(manifest, folder)
        self._starts = [each.offset for each in self.files]
        self.missing: set[int] = set()
        if manifest.transport is Transport.STREAM or memory is not None:
            self.missing.update(range(len(manifest.chunks)))
        self._lock = threading.Condition()
        self._given_up = False
        self._here_to = 0  # as far as was waited for
        # Chunks of a file, by index: those that came while others are missing, for who follows; and those that were
        # read to send a part of, since several connections ask for one between them.
        self._recent: OrderedDict[int, Chunk] = OrderedDict()

    @property
    def folder(self) -> Path:
        return self._folder or Path(self.files[0].path).parent

    def _files_of(self, offset: int, end: int) -> Sequence[FileEntry]:
        return self.files[max(bisect_right(self._starts, offset) - 1, 0) : bisect_left(self._starts, end)]

    def _reader(self, offset: int, end: int) -> PayloadReader:
        return PayloadReader(self._files_of(offset, end))

    def _read(self, chunk: ChunkEntry) -> bytes:
        with self._reader(chunk.offset, chunk.offset + chunk.length) as reader:
            return reader.read(chunk.offset, chunk.length)

    def find(self) -> None:
        """Finds the chunks that an earlier start has left in the file."""
        chunks = enumerate(self.manifest.chunks)
        self.missing = {index for index, chunk in chunks if digest(self._read(chunk)) != chunk.digest}

    # --- filling ------------------------------------------------------------------------------------

    def put(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Stores bytes of a missing chunk at `offset` of the version. Raises MeshError OVERLOADED if a file has no
        room."""
        if not self.files:
            assert self._memory is not None
            self._memory[offset : offset + len(data)] = data
            return
        end = offset + len(data)
        with self._while_there_is_room():
            for file in self._files_of(offset, end):
                start, stop = max(offset, file.offset), min(end, file.offset + file.num_bytes)
                with open(file.path, "r+b", buffering=0) as opened:
                    skip = os.fstat(opened.fileno()).st_size - file.num_bytes
                    write_at(opened.fileno(), data[start - offset : stop - offset].data, skip + start - file.offset)

    def _while_there_is_room(self) -> AbstractContextManager[None]:
        if self._memory is None:
            return room_for(self.manifest, self.folder.parent)
        return room_for(self.manifest, Path(os.path.realpath(self.files[0].path)).parent, "this host")

    def room(self, offset: int, end: int) -> NDArray[np.uint8]:
        """Where missing bytes [offset, end) are received before `take`. Raises OVERLOADED as `put`."""
        if self._memory is None:
            return np.empty(end - offset, dtype=np.uint8)
        room = self._memory[offset:end]
        if self.files and not _populated(room):  # a write to a page of a mapping that cannot be had kills the process
            with self._while_there_is_room(), open(self.files[0].path, "r+b", buffering=0) as file:
                start = os.fstat(file.fileno()).st_size - self.manifest.payload_bytes
                os.posix_fallocate(file.fileno(), start + offset, end - offset)
        return room

    def complete(self, index: int) -> None:
        """All bytes of a chunk were put. Raises MeshError DIGEST_MISMATCH."""
        chunk = self.manifest.chunks[index]
        if self._memory is not None:
            data: memoryview | bytes = self._memory[chunk.offset : chunk.offset + chunk.length].data
        else:
            data = self._read(chunk)
        self._check(chunk, data)
        self._is_here(index)

    def write(self, chunk: Chunk) -> None:
        """Takes a whole chunk of an upload; does nothing where it is here.

        Raises INVALID_REQUEST, CHUNK_CORRUPT (its checksum), DIGEST_MISMATCH (the manifest's), OVERLOADED (no room).
        """
        index = self._index_at(chunk.offset)
        entry = self.manifest.chunks[index] if index >= 0 else None
        if entry is None or (entry.offset, entry.length) != (chunk.offset, len(chunk.data)):
            text = f"[{chunk.offset}, +{len(chunk.data)}) is not a chunk of the manifest"
            raise invalid([FieldViolation("chunk.offset", text)], "the upload")
        self.take(entry, sound_bytes(chunk), framed=chunk)

    def take(self, entry: ChunkEntry, data: NDArray[np.uint8], *, framed: Chunk | None = None) -> None:
        """Takes a chunk of the manifest, which may be here already. Raises as `put`, and DIGEST_MISMATCH.

        `data` may be of `room`. `framed`: with its checksum, to be sent on.
        """
        index = self._index_at(entry.offset)
        self._check(entry, data.data)  # before it is put: the one that is here may be right
        if index in self.missing:
            if self._memory is None or not np.may_share_memory(data, self._memory):
                self.put(entry.offset, data)
            if framed is not None and self._memory is None:
                self._remember(index, framed)
            self._is_here(index)

    def _is_here(self, index: int) -> None:
        with self._lock:
            self.missing.discard(index)
            if not self.missing:
                self._recent.clear()
            self._lock.notify_all()

    def _remember(self, index: int, chunk: Chunk) -> None:
        with self._lock:
            self._recent[index] = chunk
            while sum(len(each.data) for each in self._recent.values()) > RECENT_BYTES:
                self._recent.popitem(last=False)

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            self._lock.notify_all()

    def _check(self, chunk: ChunkEntry, data: memoryview | bytes) -> None:
        if digest(data) != chunk.digest:
            raise MeshError(
                Reason.DIGEST_MISMATCH,
                f"the chunk at {chunk.offset} of version {self.manifest.version} is not the one in its manifest; did"
                " the weights change meanwhile?",
            )

    def chunks_of(self, start: int, end: int) -> Sequence[ChunkEntry]:
        """The whole chunks that make up [start, end). Raises INVALID_REQUEST where it begins or ends inside one."""
        chunks = self.manifest.chunks
        found = chunks[max(self._index_at(start), 0) : self._index_at(end - 1) + 1]
        if not found or found[0].offset != start or found[-1].offset + found[-1].length != end:
            raise invalid([FieldViolation("range", f"[{start}, {end}) is not made of chunks of the manifest")])
        return found

    def is_chunk(self, offset: int, length: int) -> bool:
        chunk = self.manifest.chunks[self._index_at(offset)]
        return (chunk.offset, chunk.length) == (offset, length)

    def _index_at(self, offset: int) -> int:
        return bisect_right(self.manifest.chunks, offset, key=lambda chunk: chunk.offset) - 1

    # --- what is here -------------------------------------------------------------------------------

    def missing_offsets(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(self.manifest.chunks[index].offset for index in sorted(self.missing))

    def here_to(self, start: int, end: int) -> int:
        """The end of the present bytes without a gap from `start` on, at most `end`; `start` if none."""
        chunks = self.manifest.chunks
        with self._lock:
            index = self._index_at(start)
            while index < len(chunks) and chunks[index].offset < end and index not in self.missing:
                index += 1
        return end if index == len(chunks) else max(start, min(end, chunks[index].offset))

    def wait_for(self, end: int) -> None:
        """Returns once all bytes up to `end` are here. Raises MeshError UNREACHABLE after `give_up`. Blocking."""
        with self._lock:
            while self._here_to < end and not self._given_up:
                self._here_to = self.here_to(self._here_to, end)
                if self._here_to < end:
                    self._lock.wait()
            if self._given_up:
                raise MeshError(Reason.UNREACHABLE, f"the rest of version {self.manifest.version} did not come")

    def verify(self, files: Literal["digests", "sizes"]) -> None:
        """Checks that the version is complete and, with `files` "digests", that a publisher's files are right.

        Payloads are not synced to disk: digests find the damage of a power cut, and the version is published again.
        Raises: CHUNKS_MISSING (a chunk, or a file that is missing or too short); DIGEST_MISMATCH.
        """
        if missing := self.missing_offsets():
            raise MeshError(
                Reason.CHUNKS_MISSING,
                f"{len(missing)} of {len(self.manifest.chunks)} chunks are missing, at"
                f" {', '.join(map(str, missing[:5]))}; send them",
            )
        if self.manifest.transport is not Transport.FILESYSTEM:
            return  # of a version that is broadcast, engines check what they receive
        try:
            with PayloadReader(self.files) as reader:
                if files == "sizes":
                    return
                chunks = self.manifest.chunks
                with ThreadPoolExecutor(VERIFIERS) as threads:  # reading and hashing leave the interpreter to others
                    found = threads.map(lambda chunk: digest(reader.read(chunk.offset, chunk.length)), chunks)
                    for chunk, hashed in zip(chunks, found, strict=True):
                        if hashed != chunk.digest:
                            raise self._changed_at_rest(chunk)
        except OSError as error:
            raise MeshError(Reason.CHUNKS_MISSING, f"the hub cannot read a file of the version: {error}") from error

    def send(self, connection: socket.socket, offset: int, end: int) -> None:
        """Sends [offset, end) from its files as they are: the receiver checks the chunks. Raises OSError."""
        with self._reader(offset, end) as reader:
            reader.send(connection, offset, end)

    def read(self, offset: int, end: int, chunk_bytes: int) -> Iterator[Chunk]:
        """Yields [offset, end) in pieces of at most `chunk_bytes`, none across chunks of the manifest.

        Raises: UNKNOWN_VERSION when the bytes are gone, DIGEST_MISMATCH when they changed at rest, NOT_SUPPORTED for a
        version whose bytes never come here.
        """
        if self.manifest.transport is Transport.NCCL:
            raise MeshError(
                Reason.NOT_SUPPORTED,
                f"version {self.manifest.version} travels in a group (transport nccl), the hub has no bytes of it; "
                "join the publisher's next group, or publish with transport stream or filesystem",
            )
        try:
            for index in range(max(self._index_at(offset), 0), len(self.manifest.chunks)):
                chunk = self.manifest.chunks[index]
                if chunk.offset >= end:
                    return
                if chunk.offset + chunk.length <= offset:
                    continue
                in_part = chunk.offset < offset or chunk.offset + chunk.length > end
                found = self._recent.get(index)
                if found is None:
                    data = self._read(chunk)
                    if digest(data) != chunk.digest:
                        raise self._changed_at_rest(chunk)
                    found = chunk_of(chunk.offset, data)
                    if in_part:
                        self._remember(index, found)
                first, last = max(offset, chunk.offset), min(end, chunk.offset + chunk.length)
                for at in range(first, last, chunk_bytes):
                    stop = min(at + chunk_bytes, last)
                    whole = stop - at == chunk.length
                    yield found if whole else chunk_of(at, found.data[at - chunk.offset : stop - chunk.offset])
        except OSError as error:
            raise MeshError(
                Reason.UNKNOWN_VERSION, f"bytes of version {self.manifest.version} are gone: {error}"
            ) from error

    def _changed_at_rest(self, chunk: ChunkEntry) -> MeshError:
        return MeshError(
            Reason.DIGEST_MISMATCH,
            f"version {self.manifest.version} changed at rest: the chunk at byte {chunk.offset} no longer matches its"
            " BLAKE3; publish it again under a new artifact or go on with the next version",
        )


def _populated(room: NDArray[np.uint8]) -> bool:
    """Gives the pages of a mapping memory: at once, and beside other threads. False where that cannot be done so."""
    start = room.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = room.ctypes.data + room.nbytes - start
    failed: int = _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), MADV_POPULATE_WRITE)
    return not failed


@contextmanager
def room_for(manifest: Manifest, spool_dir: Path, who: str = "the hub") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise MeshError(
            Reason.OVERLOADED,
            f"{who} has no room for version {manifest.version} in {spool_dir}: {error.strerror}; it has "
            f"{manifest.payload_bytes} bytes: free some space there, and send it again",
        ) from error
