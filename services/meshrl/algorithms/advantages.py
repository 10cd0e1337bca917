"""Turns the rewards of a group into advantages; between scoring and packing in the orchestrator.

Every function takes the rewards and the sampled lengths of one group and returns float32 advantages, one a rollout. A
group of equal rewards has no signal: all zeros. All raise ValueError for an empty group, arrays that differ in length
or a reward that is not finite.

Shapes: G rollouts of one task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Advantage = Callable[[Sequence[float], Sequence[int]], NDArray[np.float32]]


def mean_baseline_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
    """Reward minus the group's mean: the baseline of GRPO without its division (Dr. GRPO, arXiv 2503.20783)."""
    rewards = _checked(rewards_G, lengths_G)
    return _relative_to(rewards, np.full_like(rewards, rewards.mean()))


def grpo_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
    """Reward minus the group's mean, over its standard deviation (GRPO, arXiv 2402.03300)."""
    rewards = _checked(rewards_G, lengths_G)
    centred = _relative_to(rewards, np.full_like(rewards, rewards.mean()))
    return (centred / np.float32(rewards.std() + 1e-6)).astype(np.float32)


def rloo_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
    """Reward minus the mean of the other rollouts (RLOO, arXiv 2402.14740); a group of one has none: zero."""
    rewards = _checked(rewards_G, lengths_G)
    if rewards.size == 1:
        return np.zeros(1, dtype=np.float32)
    return _relative_to(rewards, (rewards.sum() - rewards) / (rewards.size - 1))


def opo_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
    """Reward minus the length-weighted mean, the baseline of least gradient variance (OPO, arXiv 2505.23585)."""
    rewards = _checked(rewards_G, lengths_G)
    weights = np.asarray(lengths_G, dtype=np.float64)
    if weights.min() < 0 or weights.sum() == 0:
        raise ValueError(f"a group's sampled lengths must not be negative nor all zero, got {weights.tolist()}")
    return _relative_to(rewards, np.full_like(rewards, (weights * rewards).sum() / weights.sum()))


ADVANTAGES: Mapping[str, Advantage] = {
    "default": mean_baseline_advantages,
    "grpo": grpo_advantages,
    "rloo": rloo_advantages,
    "opo": opo_advantages,
}


def _checked(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float64]:
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0 or len(lengths_G) != rewards.size:
        raise ValueError(f"a group needs a reward and a length a rollout, got {len(rewards_G)} and {len(lengths_G)}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    return rewards


def _relative_to(rewards: NDArray[np.float64], baseline: NDArray[np.float64]) -> NDArray[np.float32]:
    if np.ptp(rewards) == 0.0:  # the mean of equal floats can be off by a rounding
        return np.zeros(rewards.shape, dtype=np.float32)
    return (rewards - baseline).astype(np.float32)
