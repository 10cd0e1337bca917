"""Scores of one set of weights in one environment, with how sure they are. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from meshrl.core.metrics.statistics import distribution
from meshrl.wire.values import JsonObject

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Estimate:
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class EnvironmentScores:
    environment: str
    group_size: int
    asked: int
    scored: int
    average: Estimate | None
    """avg@k: the mean reward. None without a scored rollout."""
    passes: Mapping[int, Estimate]
    """pass@k by k: the probability that one of k rollouts of a task passes."""
    rows: Sequence[JsonObject]

    @property
    def metrics(self) -> dict[str, float]:
        name, k = f"eval/{self.environment}", self.group_size
        values = {
            f"{name}/asked": float(self.asked),
            f"{name}/scored": float(self.scored),
            f"{name}/failed": 1.0 - self.scored / self.asked if self.asked else 0.0,
        }
        if self.average is not None:
            values |= _of_estimate(f"{name}/avg@{k}", self.average)
        for number, estimate in self.passes.items():
            values |= _of_estimate(f"{name}/pass@{number}", estimate)
        values |= distribution(f"{name}/reward", [row["reward"] for row in self.rows], "std max min")
        for metric, field in (("seq_len", "num_tokens"), ("is_truncated", "truncated"), ("num_turns", "num_turns")):
            values |= distribution(f"{name}/{metric}", [row[field] for row in self.rows], "mean")
        return values


def score(
    environment: str,
    rows: Sequence[JsonObject],
    *,
    asked: int,
    group_size: int,
    pass_threshold: float,
    resamplings: int,
) -> EnvironmentScores:
    by_task: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        by_task[row["task"]].append(row["reward"])
    tasks = [by_task[task] for task in sorted(by_task)]
    draws = _draws(len(tasks), resamplings)
    average = None
    if tasks:
        sums = np.array([sum(rewards) for rewards in tasks])
        average = _estimate(sums, np.array([len(rewards) for rewards in tasks], dtype=np.float64), draws)
    passes: dict[int, Estimate] = {}
    powers = (2**power for power in range(group_size.bit_length()))  # none is larger than the group
    for k in sorted({*powers, group_size}):
        shares = [
            pass_at_k(len(rewards), sum(reward >= pass_threshold for reward in rewards), k)
            for rewards in tasks
            if len(rewards) >= k
        ]
        if shares:
            ones = np.ones(len(shares))
            passes[k] = _estimate(np.array(shares), ones, _draws(len(shares), resamplings))
    return EnvironmentScores(
        environment=environment,
        group_size=group_size,
        asked=asked,
        scored=len({(row["task"], row["number"]) for row in rows}),
        average=average,
        passes=passes,
        rows=rows,
    )


def pass_at_k(tried: int, passed: int, k: int) -> float:
    """The chance that one of `k` rollouts drawn from those `tried` is among those that `passed`, without replacement.
    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374): 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - comb(tried - passed, k) / comb(tried, k)


def _draws(tasks: int, resamplings: int) -> NDArray[np.int64]:
    """(resamplings, tasks): the tasks of each resampling; the same for the same number of tasks."""
    return np.random.default_rng(0).integers(0, max(1, tasks), size=(resamplings, tasks))


def _estimate(sums: NDArray[np.float64], counts: NDArray[np.float64], draws: NDArray[np.int64]) -> Estimate:
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value=float(sums.sum() / counts.sum()), low=float(low), high=float(high))


def _of_estimate(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}/low": estimate.low, f"{name}/high": estimate.high}
