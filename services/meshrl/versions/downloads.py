"""Downloads the missing chunks of a version over as many connections as make it faster, and resumes where one broke.

Each connection asks for the next bytes that no other has asked for (`versions.ranges`), so only bytes under way on a
broken one are sent twice. A download has no deadline: it ends when nothing came for `stall_s`.

Connections stay open for the next version. After much came from far away, new ones take their place, since lost packets
have shrunk the windows of the old ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from loguru import logger

from meshrl.client import WeightSyncClient
from meshrl.client.backoff import AWAY_S, Backoff
from meshrl.versions import raw_bytes
from meshrl.versions.ranges import SMALLEST, Claim, RangeQueue
from meshrl.versions.sources import ByteSource, ByteSources, ConnectionCount, Connections, LinkLimits, RateLimit
from meshrl.versions.uploads import TRANSIENT
from meshrl.versions.version_bytes import VersionBytes, sound_bytes
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Chunk

WINDOW_S = 0.25  # after which the number of connections is looked at
QUIET_S = 5.0  # a connection over which nothing came for so long is opened anew
CALLS = 2  # at a time on each connection, so that bytes come while the next request is on its way
FIRST_CLAIM = 128 * 1024
CLAIM_S = 1.0  # what a call asks for, by the rate of its connection
MESSAGE_S = 0.05  # what comes in one message, by the same
NEAR_CLAIM = 4 * 2**20  # at least, from near: parts of a chunk cost as much as all of it at the other side
LEAST_CLAIM_S = 0.02
LARGEST_CLAIM = 64 * 2**20
LEAST_MESSAGE = 16 * 1024
RENEWED_FROM = 128 * 1024  # bytes that came over each connection, from which on a new one is faster
CONNECT_S = 5.0
WAITING_S = 2.5  # a hub that waits for bytes itself sends empty chunks more often than this
IDLE_S = 0.05  # between two looks for a range to fetch
WARN_S = 10.0  # between two warnings in the log


def _now() -> float:
    return asyncio.get_running_loop().time()


class Downloader:
    """Keeps its connections and measurements from version to version."""

    def __init__(self, hub: WeightSyncClient, limits: LinkLimits, relays: Sequence[str] = ()) -> None:
        self._hub, self.limits = hub, limits
        self.sources = ByteSources(hub.address, relays)
        self.connections = Connections(hub)
        self.count = ConnectionCount()
        self.rate_limit = RateLimit(limits.mbps * 125_000)
        self.taken_bytes = 0
        self._renewing: asyncio.Task[None] | None = None

    async def pull(
        self, held: VersionBytes, artifact_id: str, on_bytes: Callable[[int], object] = lambda count: None
    ) -> int:
        """Fetches every missing chunk; returns how many bytes came, those that came twice included.

        `on_bytes` gets the number of bytes whenever some were put. Raises MeshError: CHUNK_CORRUPT when the link
        damages every copy, UNKNOWN_VERSION when the bytes are gone, DIGEST_MISMATCH when they changed at the hub,
        UNREACHABLE when nothing came for `stall_s`."""
        came, source, port = 0, self.sources.choose(_now()), self._hub.raw_port
        if port and source.is_hub and self.limits.mbps == 0.0:
            came = await raw_bytes.fetch(source.address, port, held, artifact_id, on_bytes)
            self.taken_bytes += came
        if not held.missing:
            return came
        came += await _Download(self, held, artifact_id, on_bytes).run()
        source = self.sources.choose(_now())
        count = self.count.count
        if source.is_far and came >= RENEWED_FROM * count and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self.connections.renew(source, count, CONNECT_S))
        return came

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        await self.connections.close()


class _Download:
    def __init__(
        self, downloader: Downloader, held: VersionBytes, artifact_id: str, on_bytes: Callable[[int], object]
    ) -> None:
        self._downloader, self._held, self._artifact_id, self._on_bytes = downloader, held, artifact_id, on_bytes
        self._queue = RangeQueue(held.manifest.chunks, held.missing)
        self._over = asyncio.Event()
        self._workers: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._checks: set[asyncio.Task[None]] = set()  # of chunks that came
        self._numbers: set[int] = set()
        self._received_at_s = _now()
        self._received_bytes = self._repeated_bytes = 0
        self._failure: MeshError | None = None
        self._is_final = False
        self._warned_s = float("-inf")

    async def run(self) -> int:
        over = asyncio.create_task(self._over.wait())
        try:
            began_s, before = _now(), 0
            while not self._over.is_set():
                count = self._downloader.count.count
                for number in set(range(count)) - self._numbers:  # those beyond end after what they are at
                    self._numbers.add(number)
                    self._workers |= {asyncio.create_task(self._work(number, call)) for call in range(CALLS)}
                await asyncio.wait({over, *self._workers}, timeout=WINDOW_S, return_when=asyncio.FIRST_COMPLETED)
                for ended in {worker for worker in self._workers if worker.done()}:
                    self._workers.discard(ended)
                    ended.result()
                now_s = _now()
                if now_s - self._received_at_s >= self._downloader.limits.stall_s and not self._over.is_set():
                    raise self._failure or MeshError(Reason.UNREACHABLE, f"{self} stands still")
                if now_s - began_s >= WINDOW_S and self._received_bytes > before:
                    rate = (self._received_bytes - before) / (now_s - began_s)
                    source = self._downloader.sources.choose(now_s)
                    source.measured(rate)
                    self._downloader.count.measured(rate, source.connections(self._downloader.limits.connections))
                    began_s, before = now_s, self._received_bytes
            if self._is_final and self._failure is not None:
                raise self._failure
            return self._received_bytes + self._repeated_bytes
        finally:
            for task in (over, *self._workers):
                task.cancel()
            await asyncio.gather(over, *self._workers, *self._checks, return_exceptions=True)
            del self._held  # the workers' tracebacks lead here, and would keep its memory until they are collected

    def __str__(self) -> str:
        return f"the fetch of version {self._held.manifest.version}, with {self._queue.chunks_left} chunks to go,"

    async def _work(self, number: int, call: int) -> None:
        rate, backoff = 0.0, Backoff(*AWAY_S)
        if call:  # the first calls are answered sooner without the others
            await self._flows.wait()
        while not self._over.is_set() and number < self._downloader.count.count:
            source = self._downloader.sources.choose(_now())
            claim = self._queue.claim(self._claim_bytes(source, rate), _now(), rate, source.patience_s)
            if claim is None:
                await asyncio.sleep(IDLE_S)
                continue
            failed = False
            try:
                await self._downloader.rate_limit.take(claim.end - claim.at)
                rate = await self._fetch(claim, number, rate)
                backoff.reset()
            except MeshError as error:
                failed, self._failure = True, error
                if _now() > self._warned_s + WARN_S:
                    self._warned_s = _now()
                    logger.warning("{} goes on: {}", self, error)
            finally:
                self._queue.release(claim)
            if failed:
                await asyncio.sleep(backoff.next_s())
        self._numbers.discard(number)

    def _claim_bytes(self, source: ByteSource, rate: float) -> int:
        size = FIRST_CLAIM if not rate else max(SMALLEST, min(round(rate * CLAIM_S), LARGEST_CLAIM))
        if self._downloader.rate_limit.bytes_per_s:
            size = min(
                size,
                max(SMALLEST, round(self._downloader.rate_limit.bytes_per_s * CLAIM_S / self._downloader.count.count)),
            )
        elif source.is_near:
            size = max(size, NEAR_CLAIM)
        least = NEAR_CLAIM if source.is_near else SMALLEST
        share = self._queue.unclaimed // (CALLS * self._downloader.count.count)
        return min(size, max(least, round(rate * LEAST_CLAIM_S), share))

    async def _fetch(self, claim: Claim, number: int, rate: float) -> float:
        if claim.at == claim.end:  # others had all of it while it waited for the rate limit
            return rate
        source, began_s = self._downloader.sources.choose(_now()), _now()
        client, size = self._downloader.connections.get(source, number), claim.end - claim.at
        try:
            await self._receive(claim, source, client, rate)
        except MeshError as error:
            await self._handle(error, source, number, client)
            raise
        return size / max(_now() - began_s, 1e-6)

    async def _handle(self, error: MeshError, source: ByteSource, number: int, client: WeightSyncClient) -> None:
        broken = client is not self._downloader.connections.get(source, number)  # another call has met it before
        if source.is_hub and error.reason not in TRANSIENT and not broken:
            self._is_final = True
            self._over.set()
            return
        if not source.is_hub and source.failed(_now(), at_once=error.reason not in TRANSIENT and not broken):
            logger.warning("relay {} is passed over: {}", source.address, error)
        if error.reason is not Reason.CHUNK_CORRUPT:
            await self._downloader.connections.drop(source, number, client)

    async def _receive(self, claim: Claim, source: ByteSource, client: WeightSyncClient, rate: float) -> None:
        at, end, asked_s, first = claim.at, claim.end, _now(), True
        claim.quiet_from_s = min(claim.quiet_from_s, asked_s)
        stream = client.fetch(
            self._artifact_id,
            [(at, end - at)],
            0 if source.is_near else max(LEAST_MESSAGE, round(rate * MESSAGE_S)),
            stall_s=min(QUIET_S, self._downloader.limits.stall_s),
        )
        async with aclosing(stream):
            async for piece in stream:
                now_s = _now()
                source.heard(now_s)
                if not len(piece.data):  # they are still on their way there
                    claim.quiet_from_s, first = now_s + WAITING_S, False
                    continue
                if first:
                    source.answered(now_s - asked_s)
                    self._downloader.count.first_answer(source.answers_in_s, self._downloader.limits.connections)
                    first = False
                if piece.offset != at:
                    raise MeshError(Reason.CHUNK_CORRUPT, f"bytes at {piece.offset} came, not those at {at}")
                at += len(piece.data)
                await self._take(claim, piece, now_s)
                if at < end and claim.at == claim.end:  # others have the rest
                    return
        if at < end:
            raise MeshError(Reason.UNREACHABLE, f"the stream ended {end - at} bytes early")

    async def _take(self, claim: Claim, piece: Chunk, now_s: float) -> None:
        start, length = claim.at, len(piece.data)
        had = start - piece.offset  # another connection was faster
        whole = piece if not had and start + length <= claim.end and self._held.is_chunk(start, length) else None
        data = None if whole else sound_bytes(piece)[had:]
        taken, complete = self._queue.arrived(claim, max(0, length - had), now_s)
        self._received_bytes += taken
        self._received_at_s = now_s
        self._flows.set()
        self._downloader.taken_bytes += taken
        self._repeated_bytes += length - taken
        if data is not None:
            self._held.put(start, data[:taken])
        try:
            if complete:
                check = asyncio.create_task(self._check(whole, complete))
                self._checks.add(check)
                check.add_done_callback(self._checked)
                await asyncio.shield(check)
        finally:
            self._on_bytes(taken)

    async def _check(self, whole: Chunk | None, complete: Sequence[int]) -> None:
        for index in complete:
            try:
                if whole is not None:
                    await asyncio.to_thread(self._held.write, whole)
                else:
                    await asyncio.to_thread(self._held.complete, index)
            except MeshError:
                self._queue.refetch(index)  # the hub, or another relay, has the right one
                raise

    def _checked(self, check: asyncio.Task[None]) -> None:
        self._checks.discard(check)
        if not self._queue.chunks_left and not self._checks:
            self._over.set()
