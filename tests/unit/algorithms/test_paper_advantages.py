"""The advantages beside plain Python floats: each formula is a loop over the group, from its paper."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from meshrl.algorithms.advantages import ADVANTAGES, opo_advantages, penalise_length, soft_overlong_penalty

MAX_LENGTH, BUFFER = 100, 40
PENALTY = functools.partial(soft_overlong_penalty, max_length=MAX_LENGTH, buffer_length=BUFFER)


def mean_baseline(rewards: list[float], lengths: list[int]) -> list[float]:
    """Dr. GRPO (2503.20783): A_i = R_i - mean."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def grpo(rewards: list[float], lengths: list[int]) -> list[float]:
    """GRPO (2402.03300): A_i = (R_i - mean) / std, the package's 1e-6 added to std."""
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def rloo(rewards: list[float], lengths: list[int]) -> list[float]:
    """RLOO (2402.14740): A_i = R_i - 1/(k-1) sum_{j != i} R_j."""
    advantages = []
    for i, reward in enumerate(rewards):
        others = [other for j, other in enumerate(rewards) if j != i]
        advantages.append(reward - math.fsum(others) / len(others) if others else 0.0)
    return advantages


def opo(rewards: list[float], lengths: list[int]) -> list[float]:
    """OPO (2505.23585): b = sum l_i R_i / sum l_i."""
    products = [length * reward for length, reward in zip(lengths, rewards, strict=True)]
    baseline = math.fsum(products) / sum(lengths)
    return [reward - baseline for reward in rewards]


def punishment(length: int) -> float:
    """DAPO (2503.14476), equation 13: the punishment as printed, not positive."""
    if length <= MAX_LENGTH - BUFFER:
        return 0.0
    if length <= MAX_LENGTH:
        return ((MAX_LENGTH - BUFFER) - length) / BUFFER
    return -1.0


PAPERS: dict[str, Callable[[list[float], list[int]], list[float]]] = {
    "default": mean_baseline,
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
}


def groups() -> list[tuple[list[float], list[int]]]:
    """Rewards and lengths."""
    rng = random.Random(0)
    return [
        ([1.0, 0.0, 0.0, 1.0], [3, 30, 12, 7]),
        ([1.0, 1.0, 1.0], [5, 6, 7]),
        ([0.3], [4]),
        ([1.0] + [0.0] * 15, [100] + [10] * 15),
        *(
            ([rng.gauss(0.0, 2.0) for _ in range(size)], [rng.randint(1, 200) for _ in range(size)])
            for size in (2, 5, 16)
        ),
    ]


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_advantages_are_the_papers_also_of_rewards_that_are_penalised_for_length(kind: str) -> None:
    for rewards, lengths in groups():
        advantages = ADVANTAGES[kind](rewards, lengths)
        assert advantages.dtype == np.float32
        assert advantages.tolist() == pytest.approx(PAPERS[kind](rewards, lengths), rel=1e-6, abs=1e-7)
        shaped = [reward + punishment(length) for reward, length in zip(rewards, lengths, strict=True)]
        penalised = penalise_length(ADVANTAGES[kind], PENALTY)(rewards, lengths)
        assert penalised.tolist() == pytest.approx(PAPERS[kind](shaped, lengths), rel=1e-6, abs=1e-7)


def test_soft_overlong_penalty_is_the_negative_of_the_papers_punishment() -> None:
    lengths = [length for _, each in groups() for length in each]
    penalties = PENALTY(lengths).tolist()
    assert penalties == pytest.approx([-punishment(length) for length in lengths], abs=1e-15)
    assert {0.0, 1.0} < set(penalties)  # and some between


def test_opo_baseline_is_where_the_length_weighted_variance_is_least() -> None:
    rewards, lengths = [1.0, 0.2, -0.5], [4, 30, 11]
    baseline = rewards[0] - float(opo_advantages(rewards, lengths)[0])

    def variance(at: float) -> float:
        return float(np.sum(np.array(lengths) * (np.array(rewards) - at) ** 2))

    slope = (variance(baseline + 1e-4) - variance(baseline - 1e-4)) / 2e-4
    assert slope == pytest.approx(0.0, abs=1e-5)
