"""The bytes of a version on an engine's host, for agents: in mapped files or in memory, without a second copy.

A version on a shared filesystem is mapped in place. One that comes in chunks is put into a buffer or, for an engine
whose model runs in other processes, into a safetensors file in shared memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from meshrl.client.private import private_folder
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
    """A version's byte stream: `parts` are (offset, bytes); `own` is a file that `release` deletes."""

    parts: tuple[tuple[int, Bytes], ...]
    files: tuple[Path, ...] = ()
    own: Path | None = None

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
        """Deletes its own file; processes that have mapped it keep the bytes."""
        if self.own is not None:
            self.own.unlink(missing_ok=True)
            with suppress(OSError):  # another version is in it, or it is gone already
                self.own.parent.rmdir()


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
    """Makes files for versions in chunks, in a folder of one engine, which its next start empties."""

    def __init__(self, folder: Path | None, name: str) -> None:
        """`folder`: its parent; None is shared memory, or the temporary folder while that is full."""
        self._name = name
        self._choices = [folder] if folder is not None else [SHM, Path(tempfile.gettempdir())]
        for choice in self._choices:
            shutil.rmtree(choice / self._name, ignore_errors=True)  # of an engine that was killed

    def room_for(self, manifest: Manifest, *, for_writes: bool = False) -> HostBytes:
        """A safetensors file for a version, its payload to be filled; `for_writes`: by writes to the file alone.

        Raises MeshError OVERLOADED: no room.
        """
        try:
            header = safetensors_header(manifest.tensors)
            size = len(header) + manifest.num_bytes
            folder = private_folder(self._folder(size))
            fd, name = tempfile.mkstemp(dir=folder, prefix=f"version_{manifest.version}-", suffix=".safetensors")
            path = Path(name)
            try:
                if not for_writes:  # a write to a page of a mapping that cannot be had kills the process
                    os.posix_fallocate(fd, 0, size)
                elif shutil.disk_usage(folder).free < size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.ftruncate(fd, size)
                os.pwrite(fd, header, 0)
                payload = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)[len(header) :]
            except OSError:
                with suppress(OSError):
                    path.unlink()
                raise
            finally:
                os.close(fd)
            return HostBytes(parts=((0, payload),), files=(path,), own=path)
        except OSError as error:
            raise no_room(manifest.version, self._choices, error) from error

    def write(self, version: int, data: Bytes) -> HostBytes:
        try:
            fd, name = tempfile.mkstemp(dir=private_folder(self._folder(len(data))), prefix=f"delta_{version}-")
            with open(fd, "wb") as file:
                file.write(data.data)
            return HostBytes(parts=((0, data),), files=(Path(name),), own=Path(name))
        except OSError as error:
            raise no_room(version, self._choices, error) from error

    def _folder(self, size: int) -> Path:
        for choice in self._choices:
            if choice.is_dir() and shutil.disk_usage(choice).free >= size + SPARE_BYTES:
                return choice / self._name
        return self._choices[-1] / self._name


def no_room(version: int, folders: Sequence[Path], error: Exception) -> MeshError:
    where = " or ".join(map(str, folders))
    text = f"version {version} cannot be written to {where} on this host: {error}; free some space there"
    return MeshError(Reason.OVERLOADED, f"{text}, and it is brought here again")
