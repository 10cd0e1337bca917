"""The bytes of a version on an engine's host, for agents: in mapped files or in memory, without a second copy.

A version on a shared filesystem is mapped in place. One that comes in chunks is put into a buffer or, for an engine
whose model runs in other processes, into a safetensors file in shared memory, which has no name and so ends with its
process.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from meshrl.core.private_folders import SHM
from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.layout import TORCH_DTYPES
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import DIGEST_BYTES_OF, SUM128
from meshrl.wire.manifest_file import open_regular, safetensors_header
from meshrl.wire.types import ChunkEntry, FileEntry, Manifest, TensorEntry

THREADS = 8  # that copy, or check chunks
COPY_BYTES = 32 * 2**20
SPARE_BYTES = 2**28  # left free in shared memory: vLLM and torch use it as well

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class HostBytes:
    """A version's byte stream: `parts` are (offset, bytes); `own` is the one of `files` that `release` deletes, and
    begins with `header`."""

    parts: tuple[tuple[int, Bytes], ...]
    files: tuple[Path, ...] = ()
    own: IO[bytes] | None = None
    header: bytes = b""

    def of(self, entry: TensorEntry | ChunkEntry) -> Bytes:
        """The bytes of a tensor or a chunk; a view, unless several files hold it."""
        pieces = []
        end = entry.offset + (entry.num_bytes if isinstance(entry, TensorEntry) else entry.length)
        for offset, data in self.parts:
            at, stop = max(entry.offset, offset), min(end, offset + len(data))
            if at < stop:
                pieces.append(data[at - offset : stop - offset])
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint8), *pieces])

    def tensors(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for entry in manifest.tensors:
            dtype = TORCH_DTYPES[entry.dtype]
            made[entry.name] = (
                torch.frombuffer(self.of(entry), dtype=dtype).reshape(entry.shape)
                if entry.num_bytes
                else torch.empty(entry.shape, dtype=dtype)
            )
        return made

    def copy_into(self, other: HostBytes) -> None:
        target = other.parts[0][1]

        def copy(piece: tuple[int, Bytes]) -> None:
            at, data = piece
            target[at : at + len(data)] = data

        pieces = [
            (offset + at, data[at : at + COPY_BYTES])
            for offset, data in self.parts
            for at in range(0, len(data), COPY_BYTES)
        ]
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(copy, pieces))

    def wrong_tensor(self, manifest: Manifest, stop: threading.Event) -> str | None:
        """Name of the first tensor whose digest is not the manifest's; None: all are right, or `stop` is set. Blocking.

        Additive digests are slow on a host, so the hashes of the chunks are checked in their place.
        """
        additive = manifest.digest_algorithm == SUM128 and len(manifest.chunks) > 0

        def sound(entry: TensorEntry | ChunkEntry) -> bool:
            return stop.is_set() or self._is_sound(entry)

        suspects = manifest.tensors
        if additive:
            with ThreadPoolExecutor(THREADS) as threads:
                checked = zip(manifest.chunks, threads.map(sound, manifest.chunks), strict=True)
                wrong = [(chunk.offset, chunk.offset + chunk.length) for chunk, is_sound in checked if not is_sound]
            suspects = tuple(
                entry
                for entry in manifest.tensors
                if any(entry.offset < end and start < entry.offset + entry.num_bytes for start, end in wrong)
            )
        return next((entry.name for entry in suspects if not sound(entry)), None)

    def _is_sound(self, entry: TensorEntry | ChunkEntry) -> bool:
        data = self.of(entry)
        if len(entry.digest) == DIGEST_BYTES_OF[SUM128]:
            words = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
            return digest_bytes(sum128(words)) == entry.digest
        threads = blake3.AUTO if isinstance(entry, TensorEntry) else 1
        return blake3(data.data, max_threads=threads).digest() == entry.digest

    def release(self) -> None:
        """Deletes its own file; processes that have it open keep the bytes."""
        if self.own is not None:
            self.own.close()


def map_files(entries: Sequence[FileEntry]) -> HostBytes:
    """Maps a publisher's files. Raises OSError for one that is missing, unreadable, too short or not a regular one."""
    parts = []
    for entry in entries:
        fd = open_regular(entry.path)
        try:
            size = os.fstat(fd).st_size
            if size < entry.num_bytes:
                raise OSError(f"{entry.path} has {size} bytes, fewer than the {entry.num_bytes} of the version in it")
            if entry.num_bytes:
                # Private rather than read-only: torch makes no tensors over memory that cannot be written.
                mapped = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
                start = size - entry.num_bytes  # the payload is the end of its file
                parts.append((entry.offset, np.frombuffer(mapped, dtype=np.uint8)[start:]))
        finally:
            os.close(fd)
    return HostBytes(parts=tuple(parts), files=tuple(Path(entry.path) for entry in entries))


def empty_bytes(manifest: Manifest) -> HostBytes:
    return HostBytes(parts=((0, np.empty(manifest.num_bytes, dtype=np.uint8)),))


class Spool:
    """Makes files for versions in chunks. Safe for threads."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where the files are; None is shared memory, or the temporary folder while that is full."""
        self._choices = [folder] if folder is not None else [SHM, Path(tempfile.gettempdir())]
        self._room: HostBytes | None = None
        self._staged = b""  # the header of the version that was staged last; empty for a delta
        self._lock = threading.Lock()

    def room_for(self, manifest: Manifest, *, for_writes: bool = False) -> HostBytes:
        """A safetensors file for a version, its payload to be filled; `for_writes`: by writes to the file alone.

        Raises MeshError OVERLOADED: no room.
        """
        header = safetensors_header(manifest.tensors)
        if (room := self._take(header)) is not None:
            return room
        size = len(header) + manifest.num_bytes
        with self._file(manifest.version, size) as file:
            if not for_writes:  # a write to a page of a mapping that cannot be had kills the process
                os.posix_fallocate(file.fileno(), 0, size)
            elif shutil.disk_usage(file.fileno()).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(file.fileno(), size)
            os.pwrite(file.fileno(), header, 0)
            payload = np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8)[len(header) :]
        return HostBytes(parts=((0, payload),), files=(_open_path(file),), own=file, header=header)

    def keep(self, room: HostBytes) -> None:
        """Takes back the room of a version that is staged, once nobody reads it any more.

        While versions in full follow each other it is kept for the next one: making and freeing its pages takes as
        long as filling them.
        """
        with self._lock:
            follows, self._staged = room.header == self._staged, room.header
            if follows and self._room is None:
                self._room = room
                return
        room.release()

    def drop_room(self) -> None:
        """Frees what is kept; nothing is, until versions in full follow each other again."""
        with self._lock:
            self._staged = b""
        self._take(b"")

    def _take(self, header: bytes) -> HostBytes | None:
        with self._lock:
            room, self._room = self._room, None
        if room is None or room.header == header:
            return room
        room.release()
        return None

    def write(self, version: int, data: Bytes) -> HostBytes:
        self.drop_room()
        with self._file(version, len(data)) as file:
            file.write(data.data)
            file.flush()
        return HostBytes(parts=((0, data),), files=(_open_path(file),), own=file)

    @contextmanager
    def _file(self, version: int, size: int) -> Iterator[IO[bytes]]:
        """Stays open, unless the block raises. Raises MeshError OVERLOADED: no room."""
        try:
            with ExitStack() as undo:
                yield undo.enter_context(tempfile.TemporaryFile(dir=self._folder(size)))
                undo.pop_all()
        except OSError as error:
            raise no_room(version, self._choices, error) from error

    def _folder(self, size: int) -> Path:
        for choice in self._choices:
            if choice.is_dir() and shutil.disk_usage(choice).free >= size + SPARE_BYTES:
                return choice
        return self._choices[-1]


def _open_path(file: IO[bytes]) -> Path:
    """By which this process, and others of its user on this host, open a file that has no name."""
    return Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def no_room(version: int, folders: Sequence[Path], error: Exception) -> MeshError:
    where = " or ".join(map(str, folders))
    text = f"version {version} cannot be written to {where} on this host: {error}; free some space there"
    return MeshError(Reason.OVERLOADED, f"{text}, and it is brought here again")
