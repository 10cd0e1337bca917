"""Serves uploads into the store and fetches out of it, on the event loop. A fetch may follow an upload under way.

Called by the hub for CreateVersion and Fetch, and by relays for Fetch; the other ends are `versions.transfer` at
publishers and `versions.downloads` at agents. A fetch that waits for bytes which have not arrived yet sends an empty
chunk now and then, so that its caller can tell this from a broken link.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Protocol

from meshrl.core.waiting import Pulse
from meshrl.versions.store import VersionStore
from meshrl.versions.transfer import chunk_of
from meshrl.weights.coordinator.coordinator import Coordinator
from meshrl.weights.coordinator.states import VersionRecord
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.types import Chunk, VersionState

SIGN_S = 1.0  # between two empty chunks
ARRIVAL_DEADLINE_S = 60.0  # for the next chunk of a version that is fetched while it arrives
WRITES_AT_ONCE = 3  # chunks of one upload


class Holdings(Protocol):
    """Which artifacts can be fetched. Raises MeshError UNKNOWN_VERSION for others."""

    def num_bytes(self, artifact_id: str) -> int:
        """Bytes of an artifact."""

    def is_arriving(self, artifact_id: str) -> bool:
        """Whether bytes of it may be on their way here."""


class Transfers:
    """Uploads and fetches of one hub or relay, on its event loop. `close` ends what waits for bytes."""

    def __init__(self, store: VersionStore, holdings: Holdings, *, max_chunk_bytes: int) -> None:
        self._store, self._holdings, self._max_chunk_bytes = store, holdings, max_chunk_bytes
        self._changed = Pulse()
        self._closed = False

    def changed(self) -> None:
        """Wakes those who wait for bytes: a chunk is here, or a version is gone."""
        self._changed.beat()

    def close(self) -> None:
        """Ends fetches that wait for bytes with DRAINING."""
        self._closed = True
        self.changed()

    async def store_upload(
        self, artifact_id: str, chunks: AsyncIterator[Chunk], on_chunk: Callable[[], object]
    ) -> None:
        """Stores chunks as they come; a few are checked and written while the next ones arrive.

        `on_chunk` is called for each that comes. Raises as `VersionStore.write`.
        """

        async def store(chunk: Chunk) -> None:
            await asyncio.to_thread(self._store.write, artifact_id, chunk)
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

    async def serve_fetch(
        self, artifact_id: str, ranges: Sequence[tuple[int, int]], chunk_bytes: int
    ) -> AsyncIterator[Chunk]:
        """Yields byte ranges (offset, length) of a version, those that still arrive as they do.

        Raises as `VersionStore.read`; VERSION_NOT_SEALED when no bytes arrive; UNREACHABLE when they stop to.
        """
        num_bytes = self._holdings.num_bytes(artifact_id)
        bad = [r for r in ranges if r[0] < 0 or r[1] < 0 or r[0] + r[1] > num_bytes]
        if bad:
            text = f"{len(bad)} ranges lie outside the version's {num_bytes} bytes, first {bad[0]}"
            raise invalid([FieldViolation("ranges", text)], "the fetch")
        most = min(chunk_bytes or self._max_chunk_bytes, self._max_chunk_bytes)
        for offset, length in ranges or ((0, num_bytes),):
            at, end, waited_s = offset, offset + length, 0.0
            while at < end:
                stop = await self._available_to(artifact_id, at, end, SIGN_S if waited_s else 0.0)
                if stop == at:
                    if waited_s > ARRIVAL_DEADLINE_S:
                        text = f"its source sent no more of artifact {artifact_id} for {ARRIVAL_DEADLINE_S:g} s"
                        raise MeshError(Reason.UNREACHABLE, text)
                    waited_s += SIGN_S
                    yield chunk_of(at, b"")
                    continue
                async with aclosing(_read_ahead(self._store.read(artifact_id, at, stop, most))) as pieces:
                    async for piece in pieces:
                        yield piece
                at, waited_s = stop, 0.0

    async def _available_to(self, artifact_id: str, at: int, end: int, wait_s: float) -> int:
        """Returns the end of the bytes that can be read from `at` on; `at` when none came within `wait_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    changed = self._changed.upcoming
                    if not self._holdings.is_arriving(artifact_id):
                        return end
                    stop = self._store.received_to(artifact_id, at, end)
                    if stop > at:
                        return stop
                    if self._closed:
                        raise MeshError(Reason.DRAINING)
                    await changed.wait()
        return at


class HubHoldings:
    """The artifacts that can be fetched from a hub: its versions, and the parts of their chains."""

    def __init__(self, store: VersionStore, coordinator: Coordinator) -> None:
        self._store, self._coordinator = store, coordinator

    def num_bytes(self, artifact_id: str) -> int:
        """As in `Holdings`; raises VERSION_NOT_SEALED when no bytes of it arrive."""
        record = self._record(artifact_id)
        if record is None:
            part = self._store.part(artifact_id)
            return 0 if part is None else part.payload_bytes
        if record.state is VersionState.STAGING and not record.arriving:
            raise MeshError(Reason.VERSION_NOT_SEALED, f"version {record.version} is still being staged")
        return record.num_bytes

    def is_arriving(self, artifact_id: str) -> bool:
        """As in `Holdings`."""
        record = self._record(artifact_id)
        return record is not None and record.state is VersionState.STAGING

    def _record(self, artifact_id: str) -> VersionRecord | None:
        """The version of an artifact; None for a part of a chain. Raises UNKNOWN_VERSION."""
        try:
            return self._coordinator.records.by_artifact(artifact_id)
        except MeshError:
            if self._store.part(artifact_id) is None:
                raise
            return None


async def _read_ahead(pieces: Iterator[Chunk]) -> AsyncGenerator[Chunk, None]:
    """Yields from a blocking iterator; the next piece is read on a thread while the last one is sent."""
    making = asyncio.create_task(asyncio.to_thread(next, pieces, None))
    try:
        while (piece := await making) is not None:
            making = asyncio.create_task(asyncio.to_thread(next, pieces, None))
            yield piece
    finally:
        with suppress(Exception):  # its result is not needed
            await making
