"""Whether a publication still moves: told by whatever thread moves it, asked by whoever would give it up."""

from __future__ import annotations

import time


class Progress:
    """When a publication last moved; for any thread. A slow link ends nothing, one that stands still does."""

    def __init__(self) -> None:
        self._moved_s = time.monotonic()

    @property
    def moved_s(self) -> float:
        """The time of the last move, of the monotonic clock; later than now while none can be seen."""
        return self._moved_s

    def moved(self, *, unseen_s: float = 0.0) -> None:
        """Something moved. `unseen_s`: how long somebody else may now be at work without a sign."""
        self._moved_s = time.monotonic() + unseen_s

    def left_s(self, stall_s: float) -> float:
        """How long it may still stand still where `stall_s` is the most."""
        return self._moved_s + stall_s - time.monotonic()
