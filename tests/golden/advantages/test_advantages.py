import functools
import json
from pathlib import Path

import numpy as np
import pytest

from meshrl.algorithms.advantages import ADVANTAGES, opo_advantages, penalise_length, soft_overlong_penalty

GOLDEN = json.loads((Path(__file__).parent / "groups.json").read_text())
PENALTY = functools.partial(
    soft_overlong_penalty, max_length=GOLDEN["max_length"], buffer_length=GOLDEN["buffer_length"]
)


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_advantages_match_the_golden_groups(kind: str) -> None:
    for case in GOLDEN["cases"]:
        advantages = ADVANTAGES[kind](case["rewards"], case["lengths"])
        assert advantages.dtype == np.float32
        assert advantages.tolist() == pytest.approx(case["advantages"][kind], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_advantages_of_length_penalised_rewards_match_the_golden_groups(kind: str) -> None:
    for case in GOLDEN["cases"]:
        advantages = penalise_length(ADVANTAGES[kind], PENALTY)(case["rewards"], case["lengths"])
        assert advantages.tolist() == pytest.approx(case["punished"][kind], rel=1e-6, abs=1e-7)


def test_soft_overlong_penalty_is_the_negative_of_the_papers_punishment() -> None:
    penalties: list[float] = []
    for case in GOLDEN["cases"]:
        penalties += PENALTY(case["lengths"]).tolist()
        assert penalties[-len(case["lengths"]) :] == pytest.approx(
            [-punish for punish in case["punishment"]], abs=1e-15
        )
    assert {0.0, 1.0} < set(penalties)  # and some between


def test_opo_baseline_is_where_the_length_weighted_variance_is_least() -> None:
    rewards, lengths = [1.0, 0.2, -0.5], [4, 30, 11]
    baseline = rewards[0] - float(opo_advantages(rewards, lengths)[0])

    def variance(at: float) -> float:
        return float(np.sum(np.array(lengths) * (np.array(rewards) - at) ** 2))

    slope = (variance(baseline + 1e-4) - variance(baseline - 1e-4)) / 2e-4
    assert slope == pytest.approx(0.0, abs=1e-5)
