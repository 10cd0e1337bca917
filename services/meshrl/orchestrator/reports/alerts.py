"""Finds in each step's record what a person should look at, like a collapsed reward; called by the finisher.

An alert is logged when it begins and when it is over. While it lasts the step's record has `alert/NAME` = 1.
`deploy/observability` has the same rules for Prometheus.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from loguru import logger

REMEMBERED = 200
RECENT = 5
ERRORED = 0.05
STARVED = 0.5
STARVED_S = 1.0
COLLAPSED = 0.5
MISMATCH_TIMES = 10.0
MISMATCH_LEAST = 1e-3
LATE_S = 1.0


class Alerts:
    """The alerts of one run. `synchronous`: the trainer waits for each batch by design."""

    def __init__(self, *, synchronous: bool) -> None:
        self._synchronous = synchronous
        self._seen: dict[str, deque[float]] = {}
        self._most_engines = 0.0
        self._on: set[str] = set()

    def check(self, metrics: Mapping[str, float], lags_s: Mapping[str, float]) -> dict[str, float]:
        """Takes a step's record and how late the programs' event loops run; returns the `alert/` metrics to add."""
        for name in ("reward/all/mean", "mismatch_kl/all/mean", "time/wait_for_batch", "time/train_step"):
            if name in metrics:
                self._seen.setdefault(name, deque(maxlen=REMEMBERED)).append(metrics[name])
        late = [f"{name} answers {lag_s:.1f} s late" for name, lag_s in sorted(lags_s.items()) if lag_s > LATE_S]
        errored = metrics.get("errored_rollouts/all", 0.0)
        failing = f"{errored:.0%} of the rollouts fail; meshrl rollouts tail --state failed says why"
        looked_at = {
            "reward_collapse": self._reward_collapse(),
            "mismatch_growth": self._mismatch_growth(),
            "starved_trainer": self._starved_trainer(),
            "stale_engine": self._stale_engine(metrics),
            "errored_rollouts": failing if errored > ERRORED else "",
            "loop_lag": ", ".join(late),
        }
        found = {name: words for name, words in looked_at.items() if words}
        for name in sorted(found.keys() - self._on):
            logger.warning("alert {}: {}", name, found[name])
        for name in sorted(self._on - found.keys()):
            logger.info("alert {} is over", name)
        self._on = set(found)
        return {f"alert/{name}": 1.0 for name in found}

    def _reward_collapse(self) -> str:
        """The mean of the last steps is far below the best that as many steps in a row had."""
        rewards = list(self._seen.get("reward/all/mean", ()))
        if len(rewards) < 2 * RECENT:
            return ""
        means = [statistics.fmean(rewards[at : at + RECENT]) for at in range(len(rewards) - RECENT + 1)]
        best, now = max(means), means[-1]
        noise = statistics.pstdev(rewards[means.index(best) : means.index(best) + RECENT])
        if best - now <= max(COLLAPSED * abs(best), 3 * noise):
            return ""
        return f"the mean reward of the last {RECENT} steps is {now:.4g}, after {best:.4g} at its best"

    def _mismatch_growth(self) -> str:
        """Engines and trainer disagree far more than in the steps before."""
        values = list(self._seen.get("mismatch_kl/all/mean", ()))
        if len(values) < 3 * RECENT:
            return ""
        usual, now = statistics.median(values[:-RECENT]), statistics.median(values[-RECENT:])
        if now <= max(MISMATCH_LEAST, MISMATCH_TIMES * usual):
            return ""
        return f"engines and trainer differ: mismatch_kl of the last {RECENT} steps is {now:.2g}, and was {usual:.2g}"

    def _starved_trainer(self) -> str:
        waits, steps = (list(self._seen.get(f"time/{part}", ()))[-RECENT:] for part in ("wait_for_batch", "train_step"))
        if self._synchronous or len(waits) < RECENT or not sum(steps):
            return ""
        share = sum(waits) / sum(steps)
        if share <= STARVED or statistics.fmean(waits) <= STARVED_S:
            return ""
        return f"the trainer waited for batches for {share:.0%} of the last {RECENT} steps: sampling is what takes long"

    def _stale_engine(self, metrics: Mapping[str, float]) -> str:
        engines = metrics.get("weights/engines")
        if engines is None:
            return ""
        self._most_engines = max(self._most_engines, engines)
        if engines >= self._most_engines:
            return ""
        return f"{engines:.0f} of {self._most_engines:.0f} engines took the version; meshrl weights engines says which"
