"""The stream transport: a version's bytes go through the hub, from a buffer on rank 0, and engines fetch them there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from meshrl.versions.deltas.publishing import DeltaMaker
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import Captured, GatheredWeights
from meshrl.versions.transports.base import Prepared, VersionLine
from meshrl.versions.transports.version_files import in_threads
from meshrl.wire.manifest import DEFAULT_CHUNK_BYTES, entries_of
from meshrl.wire.types import TensorEntry, Transport


class StreamTransport:
    """Packs gathered weights into one buffer in stream order, and hashes it, or makes a delta of it."""

    def __init__(
        self,
        line: VersionLine,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        num_threads: int = 1,
        anchor_every: int | None = None,
    ) -> None:
        """`anchor_every`: publish deltas where they pay, and a version in full after so many; None: no deltas."""
        self.progress = Progress()
        self._line, self._chunk_bytes = line, chunk_bytes
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="version-stream")
        self._deltas: DeltaMaker | None = None
        if anchor_every is not None:
            self._deltas = DeltaMaker(line, anchor_every=anchor_every, chunk_bytes=chunk_bytes, threads=self._threads)

    async def prepare(self, version: int, captured: Captured) -> Prepared:
        """Packs and hashes the version; the hub is sent the buffer that comes with it.

        A delta that is asked for again before it was delivered becomes a full version: the hub has refused it.
        """
        assert captured.gathered is not None, "a stream is of gathered weights"
        return await asyncio.to_thread(self._pack, version, captured.gathered)

    async def deliver(self, version: int) -> Mapping[str, float]:
        """Nothing is left to do: engines fetch the version from the hub. The next one may lead from it."""
        if self._deltas is not None:
            self._deltas.delivered(version)
        return {}

    async def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(wait=False)

    def _pack(self, version: int, weights: GatheredWeights) -> Prepared:
        began_s = time.monotonic()
        buffer: NDArray[np.uint8] = np.empty(sum(tensor.num_bytes for tensor in weights.tensors), dtype=np.uint8)

        def copy(tensor: TensorEntry) -> None:
            target = buffer[tensor.offset : tensor.offset + tensor.num_bytes]
            target[:] = np.frombuffer(weights.bytes_of(tensor), dtype=np.uint8)
            self.progress.moved()

        def each(digest: Callable[[tuple[int, int]], bytes], spans: Iterable[tuple[int, int]]) -> Iterable[bytes]:
            for found in self._threads.map(digest, spans):
                self.progress.moved()
                yield found

        in_threads(self._threads, copy, weights.tensors)
        if self._deltas is not None:
            made = self._deltas.make(version, weights.tensors, buffer)
            buffer.flags.writeable = False
            self.progress.moved()
            return Prepared(manifest=made.manifest, buffer=made.payload, parts_s={"write": time.monotonic() - began_s})
        tensors, chunks = entries_of(buffer.data, weights.tensors, self._chunk_bytes, each=each)
        buffer.flags.writeable = False
        manifest = self._line.manifest(version, Transport.STREAM, tensors, chunks)
        return Prepared(manifest=manifest, buffer=buffer, parts_s={"write": time.monotonic() - began_s})
