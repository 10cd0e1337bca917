"""max_rl: rl alone, with advantages over the group's mean reward, which follow the likelihood of being right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshrl.algorithms.recipes.grpo import GRPO


class MaxRL(GRPO):
    """Rewards are 0 or more, 0 and 1 in the paper."""

    def __init__(self) -> None:
        super().__init__(max_rl_advantages)


def max_rl_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
    """A_i = (R_i - mean) / mean, 0 where the mean is 0 (MaxRL, arXiv 2602.02710).

    Tasks that are seldom solved weigh most: with more rollouts a task the gradient goes from that of the expected
    reward to that of the log-likelihood of success. Raises ValueError for rewards below 0.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(rewards).all() or rewards.min() < 0.0:
        raise ValueError(
            f"max_rl divides by the mean reward, so rewards must be finite and 0 or more, got {rewards.tolist()};"
            " shift the rewards of the environment, or use the algorithm grpo"
        )
    mean = rewards.mean()
    if mean == 0.0 or np.ptp(rewards) == 0.0:
        return np.zeros(rewards.shape, dtype=np.float32)
    advantages: NDArray[np.float32] = ((rewards - mean) / mean).astype(np.float32)
    return advantages
