"""The hub's clock: counts only the seconds in which the hub ran, so that a hub that was stopped drops no engine."""

from __future__ import annotations

from collections.abc import Callable

from loguru import logger

STOPPED_S = 2.0  # the hub looks at the clock at least four times a second: a gap of this length is none of its making


class AwakeClock:
    """A monotonic clock that leaves out the times in which nobody looked at it.

    A process that was stopped (SIGSTOP, a suspended machine) finds that all leases and deadlines have passed, while the
    reports that would have renewed them wait to be read. With this clock they have as long to go as before.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._looked_s = monotonic()
        self._stopped_s = 0.0

    def __call__(self) -> float:
        now_s = self._monotonic()
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if gap_s > STOPPED_S:
            logger.warning("this hub was stopped for {:.1f} s: leases and deadlines go on from there", gap_s)
            self._stopped_s += gap_s
        return now_s - self._stopped_s
