"""Which bytes of a version each connection of a download fetches next. No I/O, no clock.

Connections claim ranges from the front. Once all are claimed, a connection without work also fetches a claim that
stands still, or takes half of a long one, so that the end does not wait for the slowest connection. Every byte is taken
exactly once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshrl.wire.types import ChunkEntry

SMALLEST = 16 * 1024  # bytes below which a range is not split
SILENT_S = 2.0
LONG_S = 1.0


@dataclass(eq=False)
class Claim:
    """Bytes [at, end) that are being fetched: `at` moves on as they come, `end` back as others take the rest.

    `rate` is in bytes/s, 0 while unknown. Nothing has come since `quiet_from_s`, which is infinite until the bytes are
    asked for.
    """

    at: int
    end: int
    rate: float
    quiet_from_s: float = float("inf")
    connections: int = 1


class RangeQueue:
    """The bytes of some chunks of a version: to be claimed, claimed, or here."""

    def __init__(self, chunks: Sequence[ChunkEntry], missing: Collection[int]) -> None:
        self._chunks = chunks
        self._offsets = [chunk.offset for chunk in chunks]
        self._left = {index: chunks[index].length for index in missing}
        self._todo: list[tuple[int, int]] = []
        for index in sorted(missing):
            start, end = chunks[index].offset, chunks[index].offset + chunks[index].length
            if self._todo and self._todo[-1][1] == start:
                start = self._todo.pop()[0]
            self._todo.append((start, end))
        self._claims: dict[Claim, None] = {}  # in order

    @property
    def chunks_left(self) -> int:
        return len(self._left)

    @property
    def unclaimed(self) -> int:
        return sum(end - start for start, end in self._todo)

    def claim(self, size: int, now_s: float, rate: float = 0.0, patience_s: float = SILENT_S) -> Claim | None:
        """At most `size` bytes; None: others are about to have the rest.

        After `patience_s` without a byte at each connection of a claim, another one may fetch it too.
        """
        if not self._todo:
            return self._help(now_s, rate, patience_s)
        start, end = heapq.heappop(self._todo)
        if end - start > size:
            stop = start + size
            of_chunk = self._offsets[bisect_right(self._offsets, stop) - 1]
            stop = of_chunk if of_chunk - start >= size // 2 else stop  # whole chunks cost both ends the least
            heapq.heappush(self._todo, (stop, end))
            end = stop
        return self._claimed(start, end, rate)

    def _claimed(self, start: int, end: int, rate: float) -> Claim:
        claim = Claim(at=start, end=end, rate=rate)
        self._claims[claim] = None
        return claim

    def _help(self, now_s: float, rate: float, patience_s: float) -> Claim | None:
        for claim in self._claims:
            if claim.at < claim.end and now_s - claim.quiet_from_s > patience_s * claim.connections:
                claim.connections += 1
                return claim
        longest = max(self._claims, key=lambda claim: claim.end - claim.at, default=None)
        if longest is None or longest.end - longest.at < 4 * SMALLEST + longest.rate * LONG_S:
            return None
        middle, end = (longest.at + longest.end) // 2, longest.end
        longest.end = middle
        return self._claimed(middle, end, rate)

    def arrived(self, claim: Claim, length: int, now_s: float) -> tuple[int, list[int]]:
        """`length` bytes came at `claim.at`; returns how many are the claim's, and the chunks now complete."""
        start, claim.at = claim.at, min(claim.at + length, claim.end)
        claim.quiet_from_s = now_s
        complete, at = [], start
        while at < claim.at:
            index = bisect_right(self._offsets, at) - 1
            stop = min(claim.at, self._chunks[index].offset + self._chunks[index].length)
            self._left[index] -= stop - at
            if not self._left[index]:
                del self._left[index]
                complete.append(index)
            at = stop
        return claim.at - start, complete

    def release(self, claim: Claim) -> None:
        claim.connections -= 1
        if claim.connections:
            return
        del self._claims[claim]
        if claim.at < claim.end:
            heapq.heappush(self._todo, (claim.at, claim.end))
            claim.end = claim.at

    def refetch(self, index: int) -> None:
        """A complete chunk was wrong: it is fetched once more."""
        chunk = self._chunks[index]
        self._left[index] = chunk.length
        heapq.heappush(self._todo, (chunk.offset, chunk.offset + chunk.length))
