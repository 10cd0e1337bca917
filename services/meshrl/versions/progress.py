"""Whether a publication still makes progress; read by the training loop, which ends one that stands still."""

from __future__ import annotations

import time


class Progress:
    """For any thread."""

    def __init__(self) -> None:
        self._moved_s = time.monotonic()

    @property
    def moved_s(self) -> float:
        """The time of the last move; later than now while none can be seen."""
        return self._moved_s

    def moved(self, *, unseen_s: float = 0.0) -> None:
        """Records progress now. `unseen_s`: how long another process may be at work without a sign."""
        self._moved_s = time.monotonic() + unseen_s

    def left_s(self, stall_s: float) -> float:
        return self._moved_s + stall_s - time.monotonic()
