"""The time that a part reads and waits by; a test passes its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

STOPPED_S = 2.0
"""An `AwakeClock` is read at least four times a second: a longer gap is not its reader's."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class AwakeClock:
    """A monotonic clock without the times in which nobody looked at it: after a stop (SIGSTOP, a suspended machine)
    deadlines have as long to go as before."""

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, *, stopped: Callable[[float], object] | None = None
    ) -> None:
        """`stopped` gets the seconds of each gap that is left out."""
        self._monotonic = monotonic
        self._stopped = stopped
        self._looked_s = monotonic()
        self._left_out_s = 0.0

    def __call__(self) -> float:
        now_s = self._monotonic()
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if gap_s > STOPPED_S:
            self._left_out_s += gap_s
            if self._stopped is not None:
                self._stopped(gap_s)
        return now_s - self._left_out_s
