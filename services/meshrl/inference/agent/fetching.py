"""Fetches a version's bytes to this host and checks them, while the engine goes on generating.

Used by `VersionLoader` for versions in files and streamed ones. Bytes come from the publisher's files where this host
can read them, else in chunks from relays or the hub. Every tensor, or every chunk, is hashed once all of it is here, so
the bytes that this module returns are those of the manifest.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Self

import numpy as np
from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.core.config.shared import WeightBroadcastConfig
from meshrl.versions.downloads import Downloader
from meshrl.versions.files import Bytes, HostBytes, Spool, empty_bytes, map_files
from meshrl.versions.parents import TransferLimits
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Manifest, TensorEntry, Transport


class VersionFetcher:
    """Fetches the versions of one engine through a downloader, which it closes.

    With a `spool`, versions that come in chunks are written into files there, else they stay in memory.
    """

    def __init__(self, downloader: Downloader, *, spool: Spool | None = None) -> None:
        self._downloader = downloader
        self._spool = spool
        self._arrived, self._awaited = 0, 0  # bytes of what is fetched now

    def arriving(self, version: int) -> str:
        """A description of the fetch under way, for the program's waits."""
        mb = f", of which {self._arrived / 1e6:.2f} of {self._awaited / 1e6:.2f} MB are here" if self._awaited else ""
        return f"version {version} from the hub{mb}"

    def begin(self) -> None:
        """A new version will be fetched: counts its bytes from zero."""
        self._arrived, self._awaited = 0, 0

    def _arrive(self, count: int) -> None:
        self._arrived += count

    @classmethod
    def over(
        cls, hub: WeightSyncClient, way: WeightBroadcastConfig | None, *, spool: Spool | None, stall_s: float | None
    ) -> Self:
        """Fetches from a hub and the relays of a configuration. `stall_s`: in place of its own."""
        way = way or WeightBroadcastConfig()
        limits = TransferLimits(
            connections=way.connections, mbps=way.max_mbps, stall_s=way.stall_s if stall_s is None else stall_s
        )
        return cls(Downloader(hub, limits, way.relays), spool=spool)

    async def close(self) -> None:
        """Ends the connections."""
        await self._downloader.close()

    async def fetch(self, manifest: Manifest, artifact_id: str) -> HostBytes:
        """Returns the verified bytes of a version, to be released once it is staged.

        Raises MeshError: DIGEST_MISMATCH when bytes are not those of the manifest; CHUNK_CORRUPT when a link damages
        every copy; UNKNOWN_VERSION when they are gone; UNREACHABLE when nothing came; OVERLOADED when
        there is no room for them.
        """
        held = await self._mapped(manifest) if manifest.transport is Transport.FILESYSTEM else None
        return held or await self._streamed(manifest, artifact_id)

    async def fetch_delta(self, manifest: Manifest) -> Bytes:
        """Returns the bytes of a delta, every chunk right. Raises MeshError as `fetch`."""
        self._awaited += manifest.payload_bytes
        payload: Bytes = np.empty(manifest.payload_bytes, dtype=np.uint8)
        artifact_id = await asyncio.to_thread(manifests.artifact_id, manifest)
        await self._downloader.fetch(manifest, artifact_id, _ChunkArrival(manifest, payload, self._arrive))
        return payload

    async def _mapped(self, manifest: Manifest) -> HostBytes | None:
        """The publisher's files as they lie; None when they cannot be read here."""
        for attempt in (1, 2):  # again once: the first try may have met a cache that was behind
            try:
                held = await asyncio.to_thread(map_files, manifest.files)
            except OSError as error:  # another host, or retired meanwhile: the hub is asked for the bytes instead
                logger.info("files of version {} cannot be used here ({}); asking the hub", manifest.version, error)
                return None
            cancelled = threading.Event()  # a fetch that is cancelled makes the hashing stop at the next tensor
            try:
                wrong = await asyncio.to_thread(held.wrong_tensor, manifest, cancelled)
            finally:
                cancelled.set()
            if wrong is None:
                return held
            logger.warning("attempt {}: tensor {!r} of version {} is damaged", attempt, wrong, manifest.version)
        raise _damaged(manifest, wrong)

    async def _streamed(self, manifest: Manifest, artifact_id: str) -> HostBytes:
        """The version from the hub, into memory or a file of the spool."""
        if self._spool is None:
            held = empty_bytes(manifest)
        else:
            held = await asyncio.to_thread(self._spool.room_for, manifest)
        self._awaited += manifest.payload_bytes
        try:
            if manifest.digest_algorithm == manifests.SUM128:
                # Additive digests are slow on a host. The hashes of the chunks cover all bytes as well.
                arrival = _ChunkArrival(manifest, held.parts[0][1], self._arrive)
                await self._downloader.fetch(manifest, artifact_id, arrival)
            else:
                hashed = _TensorArrival(manifest, held, self._arrive)
                try:
                    await self._downloader.fetch(manifest, artifact_id, hashed)
                    await hashed.check_rest()
                finally:
                    hashed.stop()
        except BaseException:  # abandoned fetches leave no file either
            held.release()
            raise
        return held


class _ChunkArrival:
    """An `Arrival` that checks each chunk by its own digest. `on_bytes` is given the number of bytes that came."""

    def __init__(self, manifest: Manifest, buffer: Bytes, on_bytes: Callable[[int], None]) -> None:
        self.missing = set(range(len(manifest.chunks)))
        self._manifest, self._buffer, self._on_bytes = manifest, buffer, on_bytes

    def put(self, offset: int, data: Bytes) -> None:
        self._buffer[offset : offset + len(data)] = data
        self._on_bytes(len(data))

    def complete(self, index: int) -> None:
        """All bytes of a chunk are here. Raises MeshError DIGEST_MISMATCH."""
        chunk = self._manifest.chunks[index]
        if manifests.digest(self._buffer[chunk.offset : chunk.offset + chunk.length].data) != chunk.digest:
            text = f"the chunk at {chunk.offset} of version {self._manifest.version} is not what its manifest says"
            raise MeshError(Reason.DIGEST_MISMATCH, text)
        self.missing.discard(index)


class _TensorArrival(_ChunkArrival):
    """An `Arrival` that hashes each tensor once its bytes are here, while the rest arrives."""

    def __init__(self, manifest: Manifest, held: HostBytes, on_bytes: Callable[[int], None]) -> None:
        super().__init__(manifest, held.parts[0][1], on_bytes)
        self._held = held
        self._next_chunk = 0  # the first one that may be missing
        self._to_come = deque(sorted(manifest.tensors, key=lambda entry: entry.offset + entry.num_bytes))
        self._here: asyncio.Queue[TensorEntry | None] = asyncio.Queue()
        self._hashing = asyncio.create_task(self._hash())

    def complete(self, index: int) -> None:
        """All bytes of a chunk are here. Raises MeshError DIGEST_MISMATCH for a tensor that was here before."""
        self.missing.discard(index)
        while self._next_chunk < len(self._manifest.chunks) and self._next_chunk not in self.missing:
            self._next_chunk += 1
        whole = self._next_chunk == len(self._manifest.chunks)
        end = self._manifest.num_bytes if whole else self._manifest.chunks[self._next_chunk].offset
        while self._to_come and self._to_come[0].offset + self._to_come[0].num_bytes <= end:
            self._here.put_nowait(self._to_come.popleft())
        if self._hashing.done():
            self._hashing.result()

    async def check_rest(self) -> None:
        """Returns once every tensor is as the manifest says. Raises MeshError DIGEST_MISMATCH."""
        for entry in self._to_come:  # of a version without bytes
            self._here.put_nowait(entry)
        self._here.put_nowait(None)
        await self._hashing

    def stop(self) -> None:
        """Ends the hashing, whatever came of it."""
        if not self._hashing.cancel() and not self._hashing.cancelled():
            self._hashing.exception()  # raised before, or the fetch was given up

    async def _hash(self) -> None:
        while (entry := await self._here.get()) is not None:
            if not await asyncio.to_thread(self._held.is_sound, entry):
                raise _damaged(self._manifest, entry.name)


def _damaged(manifest: Manifest, name: str | None) -> MeshError:
    text = f"tensor {name!r} of version {manifest.version} is not what its manifest says; it was not applied"
    return MeshError(Reason.DIGEST_MISMATCH, text)
