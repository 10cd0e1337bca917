"""How long to wait before the next attempt: twice as long each time, with jitter.

Used wherever a client, a service or an engine tries something again: watches, uploads, refused calls, lost groups.
"""

from __future__ import annotations

import random
from collections.abc import Callable

AWAY_S = (0.1, 0.5)
"""The first and the longest wait between two calls of a service that is away: it may be back right after one, and all
that stands still meanwhile does so until the next."""


class Backoff:
    """Waits that double from `first_s` to `most_s`, each shortened by up to `jitter` of itself, by chance.

    The chance spreads callers that failed together. `draw` returns it, from 0 (shortest wait) to 1 (the whole wait).
    """

    def __init__(
        self, first_s: float, most_s: float, *, jitter: float = 0.5, draw: Callable[[], float] = random.random
    ) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._jitter, self._draw = jitter, draw
        self._whole_s = first_s

    def next_s(self) -> float:
        """Seconds to wait now; the wait after it is twice as long."""
        whole_s = self._whole_s
        self._whole_s = min(2 * whole_s, self._most_s)
        return whole_s * (1.0 - self._jitter + self._jitter * self._draw()) if self._jitter else whole_s

    def reset(self) -> None:
        """Starts again from `first_s`: an attempt went well."""
        self._whole_s = self._first_s
