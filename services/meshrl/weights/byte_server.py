"""Serves uploads into the store and fetches out of it, for hubs and relays. A fetch may follow an upload under way.

A fetch that waits for bytes sends an empty chunk now and then, so that its caller can distinguish this from a broken
link.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress

from meshrl.core.waiting import Pulse, read_ahead
from meshrl.versions.store import VersionStore
from meshrl.versions.version_bytes import VersionBytes, chunk_of
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.frames import frame_fetch_chunk
from meshrl.wire.types import Chunk

SIGN_S = 1.0  # between two empty chunks
ARRIVAL_DEADLINE_S = 60.0  # for the next chunk of a version that is fetched while it arrives
WRITES_AT_ONCE = 3  # chunks of one upload


class ByteServer:
    def __init__(self, store: VersionStore, *, max_chunk_bytes: int) -> None:
        self._store, self._max_chunk_bytes = store, max_chunk_bytes
        self._changed = Pulse()
        self._closed = False

    def changed(self) -> None:
        self._changed.beat()

    def close(self) -> None:
        self._closed = True
        self.changed()

    async def store_upload(
        self, artifact_id: str, chunks: AsyncIterator[Chunk], on_chunk: Callable[[], object]
    ) -> None:
        """Stores chunks as they come, and calls `on_chunk` for each. Raises as `VersionBytes.write`."""
        held = self._store.held(artifact_id)

        async def store(chunk: Chunk) -> None:
            await asyncio.to_thread(held.write, chunk)
            self.changed()

        writes: set[asyncio.Task[None]] = set()
        try:
            async for chunk in chunks:
                on_chunk()
                if len(writes) >= WRITES_AT_ONCE:
                    done, writes = await asyncio.wait(writes, return_when=asyncio.FIRST_COMPLETED)
                    for write in done:
                        write.result()
                writes.add(asyncio.create_task(store(chunk)))
            for write in writes:
                await write
        finally:
            await asyncio.gather(*writes, return_exceptions=True)

    async def feed(
        self, artifact_id: str, ranges: Sequence[tuple[int, int]], chunk_bytes: int, arriving: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        """Yields byte ranges (offset, length) of a version in framed chunks, also of bytes that still arrive.

        `arriving`: whether bytes may be on their way here; it raises if the version is gone. Raises as
        `VersionBytes.read`; UNREACHABLE when no more bytes arrive.
        """
        held = self._store.held(artifact_id)
        num_bytes = held.manifest.payload_bytes
        bad = [r for r in ranges if r[0] < 0 or r[1] < 0 or r[0] + r[1] > num_bytes]
        if bad:
            text = f"{len(bad)} ranges lie outside the version's {num_bytes} bytes, first {bad[0]}"
            raise invalid([FieldViolation("ranges", text)], "the fetch")
        most = min(chunk_bytes or self._max_chunk_bytes, self._max_chunk_bytes)
        for offset, length in ranges or ((0, num_bytes),):
            at, end, waited_s = offset, offset + length, 0.0
            while at < end:
                stop = await self.available_to(held, at, end, SIGN_S if waited_s else 0.0, arriving)
                if stop == at:
                    if waited_s > ARRIVAL_DEADLINE_S:
                        text = f"its source sent no more of artifact {artifact_id} for {ARRIVAL_DEADLINE_S:g} s"
                        raise MeshError(Reason.UNREACHABLE, text)
                    waited_s += SIGN_S
                    yield frame_fetch_chunk(chunk_of(at, b""))
                    continue
                framed = map(frame_fetch_chunk, self._store.read(artifact_id, at, stop, most))
                async with aclosing(read_ahead(framed)) as messages:
                    async for message in messages:
                        yield message
                at, waited_s = stop, 0.0

    async def available_to(
        self, held: VersionBytes, at: int, end: int, wait_s: float, arriving: Callable[[], bool]
    ) -> int:
        """The end of the bytes that can be sent from `at` on, at most `end`; `at` if none came within `wait_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    changed = self._changed.upcoming
                    if not arriving():
                        return end
                    stop = held.here_to(at, end)
                    if stop > at:
                        return stop
                    if self._closed:
                        raise MeshError(Reason.DRAINING)
                    await changed.wait()
        return at
