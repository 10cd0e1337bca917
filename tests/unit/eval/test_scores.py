"""avg@k and pass@k with intervals, checked against counting by hand."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from meshrl.core.metrics.catalogue import Source
from meshrl.core.metrics.names import CATALOGUE
from meshrl.eval.scores import pass_at_k, score


def rows(rewards: list[list[float]]) -> list[dict[str, Any]]:
    return [
        {"task": task, "number": number, "reward": reward, "num_tokens": 10, "truncated": False, "num_turns": 2}
        for task, group in enumerate(rewards)
        for number, reward in enumerate(group)
    ]


def scored(rewards: list[list[float]], group_size: int, asked: int | None = None) -> Any:
    return score(
        "a",
        rows(rewards),
        asked=asked or len(rewards) * group_size,
        group_size=group_size,
        pass_threshold=1.0,
        resamplings=500,
    )


@pytest.mark.parametrize(("tried", "passed"), [(5, 0), (5, 2), (5, 5), (8, 3)])
def test_pass_at_k_is_the_share_of_all_draws_of_k_with_one_that_passes(tried: int, passed: int) -> None:
    rollouts = [place < passed for place in range(tried)]
    for k in range(1, tried + 1):
        draws = [any(draw) for draw in combinations(rollouts, k)]
        assert pass_at_k(tried, passed, k) == pytest.approx(sum(draws) / len(draws))


def test_scores_of_a_whole_evaluation() -> None:
    scores = scored([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]], 4)
    assert scores.average.value == pytest.approx(5 / 12)
    assert {k: estimate.value for k, estimate in scores.passes.items()} == pytest.approx(
        {1: 5 / 12, 2: (0.5 + 1) / 3, 4: 2 / 3}
    )
    metrics = CATALOGUE.record(Source.EVAL, scores.metrics)  # each of them is declared
    assert metrics["eval/a/avg@4"] == pytest.approx(5 / 12)
    assert (metrics["eval/a/scored"], metrics["eval/a/asked"], metrics["eval/a/failed"]) == (12.0, 12.0, 0.0)


def test_the_interval_is_over_tasks_since_rollouts_of_a_task_are_alike() -> None:
    """50 tasks of 0 or 1, each four times: as unsure as 50 numbers, not as 200."""
    coins = np.random.default_rng(1).integers(0, 2, size=50).astype(float)
    scores = scored([[coin] * 4 for coin in coins], 4)
    normal = 1.96 * coins.std() / np.sqrt(50)
    assert scores.average.high - scores.average.value == pytest.approx(normal, rel=0.2)
    assert scores.average.value - scores.average.low == pytest.approx(normal, rel=0.2)


def test_rollouts_that_failed_are_left_out_and_counted() -> None:
    scores = scored([[1.0, 1.0], [0.0]], 2, asked=6)
    assert scores.average.value == pytest.approx(2 / 3)
    assert scores.metrics["eval/a/failed"] == pytest.approx(0.5)
    assert scores.passes[2].value == 1.0  # of the one task with two rollouts


def test_nothing_scored_has_no_average() -> None:
    scores = scored([], 2, asked=4)
    assert scores.average is None
    assert scores.metrics == {"eval/a/asked": 4.0, "eval/a/scored": 0.0, "eval/a/failed": 1.0}
