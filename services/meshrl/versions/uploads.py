"""Uploads the chunks of a version to the hub and resumes a broken upload.

An upload has no deadline: it ends when no call made progress for a while. Every chunk has a CRC32C of its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from meshrl.client import WeightSyncClient
from meshrl.client.backoff import AWAY_S, Backoff
from meshrl.core.waiting import read_ahead
from meshrl.versions import raw_bytes
from meshrl.versions.progress import Progress
from meshrl.versions.sources import ByteSource, Connections, LinkLimits, RateLimit
from meshrl.versions.version_bytes import chunk_of
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.frames import frame_upload_chunk
from meshrl.wire.types import EngineInfo, Manifest, StagedVersion, capabilities

# Worth asking again: the link or the hub was away, or a chunk was damaged on its way.
TRANSIENT = frozenset({Reason.UNREACHABLE, Reason.DRAINING, Reason.DEADLINE_PASSED, Reason.CHUNK_CORRUPT})
INCOMPLETE = frozenset({Reason.CHUNKS_MISSING})
NO_ROOM = frozenset({Reason.OVERLOADED})  # room may come: the hub retires versions meanwhile
RETRY_FOR_S = 60.0
SEAL_S = 30.0
HASHED_BYTES_PER_S = 50e6  # what a hub on a slow disk still reads and hashes


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The capabilities of the hub, by default those of this release, and its engines."""

    hub: Collection[str] = capabilities.HUB
    engines: Sequence[EngineInfo] = ()

    def engines_can(self, capability: str) -> bool:
        return all(capability in engine.capabilities for engine in self.engines)


TODAY = Peers()


class Attempts:
    """Attempts at one upload, until it has stood still for `stall_s`."""

    def __init__(self, stall_s: float, *, left: int, also: Collection[Reason] = ()) -> None:
        """`left` is what is to be moved, in any unit; `also`: reasons to try again beside those in TRANSIENT."""
        self._stall_s, self._left, self._worth_it = stall_s, left, TRANSIENT.union(also)
        self._moved_s = asyncio.get_running_loop().time()
        self._backoff = Backoff(*AWAY_S)
        self._progressed = True  # in the last attempt of which that is known

    async def another(self, failure: MeshError, *, left: int | None) -> None:
        """Waits a little before the next attempt. Raises `failure` when there is none.

        `left` is the rest to be moved; None while unknown, which counts as progress once.
        """
        now_s = asyncio.get_running_loop().time()
        further = self._progressed if left is None else left < self._left
        if further:
            self._moved_s = now_s
            self._backoff.reset()
        self._progressed = further and left is not None
        self._left = self._left if left is None else left
        wait_s = self._backoff.next_s()
        if failure.reason not in self._worth_it or now_s + wait_s - self._moved_s >= self._stall_s:
            raise failure
        await asyncio.sleep(wait_s)


class Uploader:
    def __init__(
        self,
        client: WeightSyncClient,
        progress: Progress,
        *,
        retry_for_s: float = RETRY_FOR_S,
        limits: LinkLimits | None = None,
    ) -> None:
        """`retry_for_s`: how long a hub that is away, or takes nothing, is called again."""
        self._client, self._progress = client, progress
        self._retry_for_s, self._limits = retry_for_s, limits or LinkLimits(connections=1)
        self._connections: Connections | None = None  # beside the client's own
        self._rate_limit = RateLimit(self._limits.mbps * 125_000)
        self._hub = ByteSource(address=client.address, is_hub=True)
        self.connections = 1  # the most that an upload had

    async def close(self) -> None:
        if self._connections is not None:
            await self._connections.close()

    async def peers(self) -> Peers:
        attempts = Attempts(self._retry_for_s, left=0)
        while True:
            try:
                engines = await self._client.list_engines()
                return Peers(hub=self._client.capabilities or (), engines=engines)
            except MeshError as error:
                await attempts.another(error, left=0)
                logger.warning("the hub cannot be asked for what it can do: {}; asking again", error)

    async def stage(self, manifest: Manifest, buffer: NDArray[np.uint8] | None = None) -> StagedVersion:
        """Sends the hub a manifest and the missing chunks of a streamed version.

        Raises MeshError as `WeightSyncClient.create_version` does, if another attempt will not help.
        """
        missing: Sequence[int] = () if buffer is None else tuple(chunk.offset for chunk in manifest.chunks)
        attempts = Attempts(self._retry_for_s, left=len(missing), also=INCOMPLETE | NO_ROOM)
        while True:
            try:
                staged = await self._send(manifest, buffer, missing)
                missing = staged.missing_offsets
                if not missing:
                    return staged
                raise MeshError(Reason.CHUNKS_MISSING, f"the hub still misses {len(missing)} chunks")
            except MeshError as error:
                left: int | None = len(missing)
                if buffer is not None and error.reason in TRANSIENT | NO_ROOM:
                    try:
                        missing = (await self._client.create_version(manifest)).missing_offsets
                        left = len(missing)
                    except MeshError:  # it is still away, and is sent what it is not known to have
                        left = None
                await attempts.another(error, left=left)
                to_go = "some" if left is None else left
                logger.warning("upload of version {} goes on, {} chunks to go: {}", manifest.version, to_go, error)

    async def _send(
        self, manifest: Manifest, buffer: NDArray[np.uint8] | None, missing: Sequence[int]
    ) -> StagedVersion:
        if buffer is None:
            return await self._client.create_version(manifest, stall_s=self._retry_for_s)
        if self._limits.mbps == 0.0 and manifest.payload_bytes >= raw_bytes.FROM_BYTES:
            staged = await self._client.create_version(manifest)
            if staged.raw_port:
                if await raw_bytes.send(self._client.address, staged, manifest, buffer, self._progress.moved):
                    return replace(staged, missing_offsets=())
                staged = await self._client.create_version(manifest)
            if not (missing := staged.missing_offsets):
                return staged
        length_of = {chunk.offset: chunk.length for chunk in manifest.chunks}
        queue = deque(missing)

        def framed() -> Iterator[bytes]:
            with suppress(IndexError):  # none is left
                while True:
                    offset = queue.popleft()
                    yield frame_upload_chunk(chunk_of(offset, buffer[offset : offset + length_of[offset]]))

        async def chunks() -> AsyncIterator[bytes]:
            async with aclosing(read_ahead(framed())) as messages:
                async for message in messages:
                    await self._rate_limit.take(len(message))
                    yield message
                    self._progress.moved()  # it was taken

        count = await self._count(len(missing))
        self.connections = max(self.connections, count)
        if count == 1:
            return await self._client.create_version(manifest, chunks(), stall_s=self._retry_for_s)
        staged = await self._client.create_version(manifest)
        queue = deque(staged.missing_offsets)
        hub = self._hub
        connections = self._connections = self._connections or Connections(self._client)

        async def send_over(number: int) -> MeshError | None:
            client = connections.get(hub, number)
            try:
                await client.create_version(manifest, chunks(), stall_s=self._retry_for_s)
            except MeshError as error:
                await connections.drop(hub, number, client)
                return error
            return None

        ends = await asyncio.gather(*(send_over(number) for number in range(count)))
        failures = sorted((end for end in ends if end is not None), key=lambda end: end.reason in TRANSIENT)
        if failures:  # the worst of them: what is not worth another try comes first
            raise failures[0]
        return await self._client.create_version(manifest)

    async def _count(self, num_chunks: int) -> int:
        most = min(self._limits.connections, num_chunks)
        if most > 1 and math.isinf(self._hub.answers_in_s):
            await self._client.epoch()  # opens the connection
            began_s = time.monotonic()
            await self._client.epoch()
            self._hub.answered(time.monotonic() - began_s)
        return most if most > 1 and self._hub.is_far else 1

    async def seal(
        self, manifest: Manifest, artifact_id: str, traceparent: str, buffer: NDArray[np.uint8] | None = None
    ) -> None:
        """Declares a staged version complete, again while the hub is away; chunks that it lost are sent again."""
        also = INCOMPLETE if buffer is not None else frozenset()
        attempts = Attempts(self._retry_for_s, left=0, also=also)
        deadline_s = SEAL_S + manifest.payload_bytes / HASHED_BYTES_PER_S  # it may have to hash all of it
        while True:
            began_s = time.monotonic()
            self._progress.moved(unseen_s=deadline_s)
            try:
                await self._client.seal_version(
                    run_id=manifest.run_id,
                    epoch=manifest.epoch,
                    version=manifest.version,
                    artifact_id=artifact_id,
                    traceparent=traceparent,
                    deadline_s=deadline_s,
                )
            except MeshError as error:
                if time.monotonic() - began_s > self._retry_for_s:  # the hub was at work so long
                    attempts = Attempts(self._retry_for_s, left=0, also=also)
                await attempts.another(error, left=0)
                logger.warning("version {} is not sealed yet: {}; asking again", manifest.version, error)
                if error.reason in INCOMPLETE:
                    await self.stage(manifest, buffer)
            else:
                return
            finally:
                self._progress.moved()
