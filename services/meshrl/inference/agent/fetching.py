"""Brings a version's bytes to this host and checks them, while the engine goes on generating.

From files, when this host sees them; else from the hub in chunks, resumed from the chunks that are already here. Every
piece has a checksum of its own, every tensor is hashed once all of it is here: what leaves this module has the
manifest's result root.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import torch
from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.client.transfers import Attempts
from meshrl.inference.agent.host_files import Bytes, HostBytes, Spool, empty_bytes, map_files
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Manifest, TensorEntry, Transport


@dataclass(frozen=True, kw_only=True, eq=False)
class Fetched:
    """Verified tensors by name, views of memory or files; `files` hold the same, where the engine reads files."""

    tensors: dict[str, torch.Tensor]
    files: tuple[Path, ...]
    held: HostBytes

    def release(self) -> None:
        """Deletes what was written for this version alone; tensors at hand stay valid."""
        self.held.release()


class VersionFetcher:
    """Fetches artifacts through one client. `stall_s`: give up after this long without a new chunk.

    With a `spool`, versions come with files.
    """

    def __init__(self, client: WeightSyncClient, *, stall_s: float, spool: Spool | None = None) -> None:
        self._client = client
        self._stall_s = stall_s
        self._spool = spool

    async def fetch(self, manifest: Manifest, artifact_id: str) -> Fetched:
        """Returns the version, to be released once it is staged.

        Raises MeshError: DIGEST_MISMATCH when bytes are not those of the manifest; CHUNK_CORRUPT when a link damages
        every copy; UNKNOWN_VERSION when they are gone; UNREACHABLE when nothing came for `stall_s`; OVERLOADED when
        there is no room for them.
        """
        held = await self._mapped(manifest) if manifest.transport is Transport.FILESYSTEM else None
        if held is None:
            held = await self._streamed(manifest, artifact_id)
        return Fetched(tensors=held.tensors(manifest), files=() if self._spool is None else held.files, held=held)

    async def _mapped(self, manifest: Manifest) -> HostBytes | None:
        """The publisher's files as they lie; None when they cannot be read here."""
        for attempt in (1, 2):  # again once: the first try may have met a cache that was behind
            try:
                held = await asyncio.to_thread(map_files, manifest.files)
            except OSError as error:  # another host, or retired meanwhile: the hub is asked for the bytes instead
                logger.info("files of version {} cannot be used here ({}); asking the hub", manifest.version, error)
                return None
            wrong = await _wrong_tensor(manifest, held)
            if wrong is None:
                return held
            logger.warning("attempt {}: tensor {!r} of version {} is damaged", attempt, wrong, manifest.version)
        raise _damaged(manifest, wrong)

    async def _streamed(self, manifest: Manifest, artifact_id: str) -> HostBytes:
        if self._spool is None:
            held = empty_bytes(manifest)
        else:
            held = await asyncio.to_thread(self._spool.room_for, manifest)
        arrival = _Arrival(manifest, held)
        try:
            await self._stream(manifest, artifact_id, arrival)
            await arrival.check_rest()
        except BaseException:  # abandoned fetches leave no file either
            held.release()
            raise
        finally:
            arrival.stop()
        return held

    async def _stream(self, manifest: Manifest, artifact_id: str, arrival: _Arrival) -> None:
        missing = arrival.missing
        attempts = Attempts(self._stall_s, left=len(missing))
        while missing:
            try:
                await self._stream_once(manifest, artifact_id, arrival)
            except MeshError as error:
                await attempts.another(error, left=len(missing))
                logger.warning(
                    "fetch of version {} goes on, {} chunks missing: {}", manifest.version, len(missing), error
                )

    async def _stream_once(self, manifest: Manifest, artifact_id: str, arrival: _Arrival) -> None:
        order = sorted(arrival.missing)
        filled = 0  # bytes of the chunk at order[0] that have arrived
        async for piece in self._client.fetch(artifact_id, _ranges(manifest, order), stall_s=self._stall_s):
            data = np.frombuffer(piece.data, dtype=np.uint8)  # the checksum takes no memoryview
            if google_crc32c.value(data) != piece.crc32c:
                raise MeshError(Reason.CHUNK_CORRUPT, f"bytes at {piece.offset} do not match their CRC32C")
            chunk = manifest.chunks[order[0]] if order else None
            if chunk is None or piece.offset != chunk.offset + filled or filled + len(data) > chunk.length:
                raise MeshError(Reason.CHUNK_CORRUPT, f"bytes at {piece.offset} are not those that were asked for")
            filled += len(data)
            arrival.put(piece.offset, data)
            if filled == chunk.length:
                arrival.complete(order.pop(0))
                filled = 0
        if order:
            raise MeshError(Reason.UNREACHABLE, f"the hub ended the stream with {len(order)} chunks to go")


class _Arrival:
    """A version that comes in chunks. Each tensor is hashed once its bytes are here, beside the arrival of the rest."""

    def __init__(self, manifest: Manifest, held: HostBytes) -> None:
        self.missing = set(range(len(manifest.chunks)))
        self._manifest, self._held = manifest, held
        self._next_chunk = 0  # the first one that may be missing
        self._to_come = deque(sorted(manifest.tensors, key=lambda entry: entry.offset + entry.num_bytes))
        self._here: asyncio.Queue[TensorEntry | None] = asyncio.Queue()
        self._hashing = asyncio.create_task(self._hash())

    def put(self, offset: int, data: Bytes) -> None:
        buffer = self._held.parts[0][1]
        buffer[offset : offset + len(data)] = data

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
        if not self._hashing.cancel() and not self._hashing.cancelled():
            self._hashing.exception()  # raised before, or nobody waits for it any more

    async def _hash(self) -> None:
        while (entry := await self._here.get()) is not None:
            if not await asyncio.to_thread(self._held.is_sound, entry):
                raise _damaged(self._manifest, entry.name)


def _ranges(manifest: Manifest, indices: Sequence[int]) -> list[tuple[int, int]]:
    """Joins neighbouring chunks into (offset, length)."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        chunk = manifest.chunks[index]
        if ranges and sum(ranges[-1]) == chunk.offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + chunk.length)
        else:
            ranges.append((chunk.offset, chunk.length))
    return ranges


async def _wrong_tensor(manifest: Manifest, held: HostBytes) -> str | None:
    """Hashes off the loop; a cancelled fetch makes it stop at the next tensor."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(held.wrong_tensor, manifest, stop)
    finally:
        stop.set()


def _damaged(manifest: Manifest, name: str | None) -> MeshError:
    text = f"tensor {name!r} of version {manifest.version} is not what its manifest says; it was not applied"
    return MeshError(Reason.DIGEST_MISMATCH, text)
