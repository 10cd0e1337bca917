"""How many tokens/s an engine samples for this process: a moving average over its last calls. No I/O, no clock.

The rate of a call is multiplied by the calls beside it, so that an engine with few calls does not count as slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

REMEMBERED = 32
"""Each answered call moves the average by one part in so many."""

KNOWN_AFTER = 4
"""Calls after which a rate counts in full; before, the mean of all engines counts for the rest."""

FADES_S = 60.0
"""So old a call counts half, so that no engine is left out for its past."""

LEAST_SHARE = 1 / 16
"""Of the mean: no engine counts for less."""


@dataclass(frozen=True)
class RunningCall:
    """`before_s` is the time of all calls at the engine before this one."""

    began_s: float
    before_s: float


@dataclass(frozen=True)
class CallTiming:
    """`beside` is how many calls ran meanwhile, itself included."""

    seconds: float
    beside: float


class EngineRate:
    def __init__(self) -> None:
        self.running = 0
        self._calls_s = 0.0  # the time of all calls so far
        self._changed_s = 0.0
        self._tokens = self._seconds = 0.0  # averages of a call
        self._heard = 0.0  # calls, of which old ones count for less
        self._heard_s = 0.0

    def began(self, now_s: float) -> RunningCall:
        self._go_on(now_s, 1)
        return RunningCall(now_s, self._calls_s)

    def ended(self, call: RunningCall, now_s: float) -> CallTiming:
        self._go_on(now_s, -1)
        seconds = max(now_s - call.began_s, 1e-6)
        return CallTiming(seconds, max(1.0, (self._calls_s - call.before_s) / seconds))

    def _go_on(self, now_s: float, calls: int) -> None:
        self._calls_s += self.running * (now_s - self._changed_s)
        self.running, self._changed_s = self.running + calls, now_s

    def sampled(self, timing: CallTiming, tokens: int, now_s: float) -> None:
        self._heard, self._heard_s = self._left(now_s) + 1, now_s
        weight = 1 / min(self._heard, REMEMBERED)
        self._tokens += weight * (tokens * timing.beside - self._tokens)
        self._seconds += weight * (timing.seconds - self._seconds)

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._heard else None

    def estimate(self, mean: float, now_s: float) -> float:
        """The likely tokens/s now; `mean` is that of all engines."""
        if (rate := self.tokens_per_s) is None:
            return mean
        trust = min(1.0, self._left(now_s) / KNOWN_AFTER)
        return max(mean + trust * (rate - mean), LEAST_SHARE * mean)

    def _left(self, now_s: float) -> float:
        return self._heard * math.exp2((self._heard_s - now_s) / FADES_S)


def mean_rate(rates: Iterable[EngineRate]) -> float:
    known = [rate.tokens_per_s for rate in rates if rate.tokens_per_s]
    return sum(known) / len(known) if known else 1.0
