"""Brings a version's bytes to this host and checks them, while the engine goes on generating.

From files, when this host sees them; else from the hub in chunks, resumed from the chunks that are already here. Chunks
are checked against the manifest as they come, every tensor once all are here: what leaves this module has the
manifest's result root.
"""

from __future__ import annotations

import asyncio
import random
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
from meshrl.inference.host_files import Bytes, HostBytes, Spool, empty_bytes, map_files
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Manifest, Transport

CHECKS_AT_ONCE = 4  # chunks of a version that are hashed while the next ones arrive
# Worth asking again: the link or the hub was away, or a chunk was damaged on its way.
_TRANSIENT = frozenset({Reason.UNREACHABLE, Reason.DRAINING, Reason.DEADLINE_PASSED, Reason.CHUNK_CORRUPT})


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
        try:
            held = (
                empty_bytes(manifest)
                if self._spool is None
                else await asyncio.to_thread(self._spool.room_for, manifest)
            )
        except OSError as error:
            text = f"no room on this host for the {manifest.num_bytes} bytes of version {manifest.version}: {error}"
            raise MeshError(Reason.OVERLOADED, text) from error
        try:
            await self._stream(manifest, artifact_id, held.parts[0][1], set(range(len(manifest.chunks))))
            wrong = await _wrong_tensor(manifest, held)
            if wrong is not None:
                raise _damaged(manifest, wrong)
        except BaseException:  # abandoned fetches leave no file either
            held.release()
            raise
        return held

    async def _stream(self, manifest: Manifest, artifact_id: str, buffer: Bytes, missing: set[int]) -> None:
        loop = asyncio.get_running_loop()
        progress_s, wait_s = loop.time(), 0.1
        while missing:
            before = len(missing)
            try:
                async with asyncio.timeout(self._stall_s) as patience:
                    await self._stream_once(manifest, artifact_id, buffer, missing, patience)
            except TimeoutError:
                error = MeshError(Reason.UNREACHABLE, f"no chunk of the version came for {self._stall_s:g} s")
            except MeshError as failure:
                error = failure
            else:
                continue
            now_s = loop.time()
            if len(missing) < before:
                progress_s, wait_s = now_s, 0.1
            if error.reason not in _TRANSIENT or now_s - progress_s >= self._stall_s:
                raise error
            logger.warning("fetch of version {} resumes, {} chunks missing: {}", manifest.version, len(missing), error)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, 2.0)

    async def _stream_once(
        self,
        manifest: Manifest,
        artifact_id: str,
        buffer: Bytes,
        missing: set[int],
        patience: asyncio.Timeout,
    ) -> None:
        loop = asyncio.get_running_loop()
        checks = _Checks(manifest, buffer, missing)
        order = sorted(missing)
        filled = 0  # bytes of the chunk at order[0] that have arrived
        ranges = _ranges(manifest, order)
        try:
            async for piece in self._client.fetch(artifact_id, ranges):
                patience.reschedule(loop.time() + self._stall_s)
                data = np.frombuffer(piece.data, dtype=np.uint8)  # the checksum takes no memoryview
                if google_crc32c.value(data) != piece.crc32c:
                    raise MeshError(Reason.CHUNK_CORRUPT, f"bytes at {piece.offset} do not match their CRC32C")
                chunk = manifest.chunks[order[0]] if order else None
                if chunk is None or piece.offset != chunk.offset + filled or filled + len(data) > chunk.length:
                    raise MeshError(Reason.CHUNK_CORRUPT, f"bytes at {piece.offset} are not those that were asked for")
                filled += len(data)
                buffer[piece.offset : piece.offset + len(data)] = data
                if filled == chunk.length:
                    await checks.begin(order.pop(0))
                    filled = 0
        finally:  # where the line breaks, too: what is here is not fetched again
            await checks.end()
        if order:
            raise MeshError(Reason.UNREACHABLE, f"the hub ended the stream with {len(order)} chunks to go")


class _Checks:
    """Hashes a few chunks that are here while the next ones arrive; those that are sound leave `missing`."""

    def __init__(self, manifest: Manifest, buffer: Bytes, missing: set[int]) -> None:
        self._manifest, self._buffer, self._missing = manifest, buffer, missing
        self._under_way: deque[tuple[int, asyncio.Task[bool]]] = deque()

    async def begin(self, index: int) -> None:
        """Starts to check a chunk. Raises MeshError DIGEST_MISMATCH for an earlier one."""
        if len(self._under_way) == CHECKS_AT_ONCE:
            await self._end_first()
        check = asyncio.create_task(asyncio.to_thread(_sound, self._manifest, index, self._buffer))
        self._under_way.append((index, check))

    async def end(self) -> None:
        """Returns once every check is over. Raises MeshError DIGEST_MISMATCH."""
        while self._under_way:
            await self._end_first()

    async def _end_first(self) -> None:
        index, check = self._under_way.popleft()
        if not await check:
            raise _mismatch(self._manifest, index)
        self._missing.discard(index)


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


def _sound(manifest: Manifest, index: int, buffer: Bytes) -> bool:
    chunk = manifest.chunks[index]
    return manifests.digest(buffer.data[chunk.offset : chunk.offset + chunk.length]) == chunk.digest


def _mismatch(manifest: Manifest, index: int) -> MeshError:
    where = manifest.chunks[index].offset
    return MeshError(
        Reason.DIGEST_MISMATCH,
        f"the chunk at byte {where} of version {manifest.version} is not what its manifest says; it was not applied",
    )


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
