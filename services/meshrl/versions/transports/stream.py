"""The stream transport: a version's bytes go from a buffer on rank 0 through the hub to the engines.

Where all ranks are on one host, they write their rows of a version in full into one file in shared memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.core.durable import write_at
from meshrl.versions.transports.base import Answer, Prepared, PublishCall, VersionCall
from meshrl.versions.transports.rows import RowShare, RowTransport, in_slices, in_threads
from meshrl.wire.manifest import SUM128, chunks_of, entries_of
from meshrl.wire.types import Transport

Bytes = NDArray[np.uint8]


class WriteRows(VersionCall):
    """Write the rank's rows of a version into the file of the version in full."""


class StreamShare(RowShare):
    @property
    def handlers(self) -> Mapping[type[PublishCall], Callable[[Any], Answer]]:
        return {**super().handlers, WriteRows: self._write_rows}

    @property
    def full_path(self) -> Path:
        return self.folder / f"full-{self.epoch}"

    def on_host(self, version: int) -> Bytes:
        return self.bytes_of(self.held.get(version, deadline_s=self.deadline_s))

    def _write_rows(self, call: WriteRows) -> Answer:
        with self._snapshot(call.version) as snapshot, self.full_path.open("r+b", buffering=0) as file:

            def put(piece: tuple[int, memoryview]) -> None:
                offset, data = piece
                write_at(file.fileno(), data, offset)
                self.progress.moved()

            in_threads(self._threads, put, in_slices(self.pieces_of(snapshot)))
        return {}


class StreamTransport(RowTransport[StreamShare]):
    def _full(self, version: int) -> Prepared:
        payload = self._share.on_host(version) if self._num_shares == 1 else self._written(version)
        if self._rule is None:
            tensors, chunks = entries_of(payload.data, self._tensors, self._chunk_bytes, each=self._each)
            algorithm = ""
        else:
            chunks = chunks_of(payload.data, self._chunk_bytes, each=self._each)
            tensors, algorithm = self._digested, SUM128
        manifest = self._line.manifest(version, Transport.STREAM, tensors, chunks, digest_algorithm=algorithm)
        return Prepared(manifest=manifest, in_full=manifest, buffer=payload)

    def _written(self, version: int) -> Bytes:
        """The version's bytes, which all ranks write into one file; it goes with their last use."""
        path, num_bytes = self._share.full_path, sum(tensor.num_bytes for tensor in self._tensors)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with path.open("xb+") as file:
            try:
                if num_bytes:  # room for all of it, now: a write into memory that is full would end the process
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                self._ranks.call(WriteRows(version=version), stall_s=self._stall_s)
                mapped = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ) if num_bytes else b""
            finally:
                path.unlink()
        return np.frombuffer(mapped, dtype=np.uint8)
