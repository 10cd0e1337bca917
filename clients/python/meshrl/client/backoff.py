"""Waits between attempts, twice as long each time, with jitter."""

from __future__ import annotations

import random
from collections.abc import Callable

AWAY_S = (0.1, 0.5)
"""First and longest wait between calls of a service that is away."""


class Backoff:
    """Doubles from `first_s` to `most_s`. Each wait is shortened at random by up to `jitter` of itself, to spread
    callers that failed together. `draw` returns 0 (shortest wait) to 1 (whole wait)."""

    def __init__(
        self, first_s: float, most_s: float, *, jitter: float = 0.5, draw: Callable[[], float] = random.random
    ) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._jitter, self._draw = jitter, draw
        self._whole_s = first_s

    def next_s(self) -> float:
        whole_s = self._whole_s
        self._whole_s = min(2 * whole_s, self._most_s)
        return whole_s * (1.0 - self._jitter + self._jitter * self._draw()) if self._jitter else whole_s

    def reset(self) -> None:
        self._whole_s = self._first_s
