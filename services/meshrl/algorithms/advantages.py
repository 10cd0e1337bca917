"""Turns the rewards of a group into advantages; between scoring and packing in the orchestrator.

Every function takes the rewards and the sampled lengths of one group and returns float32 advantages, one a rollout:
zeros for equal rewards, which have no signal. All raise ValueError for an empty group, arrays that differ in length or
a reward that is not finite. The normaliser of the loss is chosen in `objective`.

Notation: R_i the reward of rollout i, l_i its sampled tokens. Shapes: G rollouts of one task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshrl.algorithms.imports import load_function

Advantage = Callable[[Sequence[float], Sequence[int]], NDArray[np.float32]]


def mean_baseline_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
    """A_i = R_i - sum_j R_j / G: the baseline of GRPO without its division, which would weigh those tasks most that are
    almost always or almost never solved (Dr. GRPO, arXiv 2503.20783)."""
    rewards = _checked(rewards_G, lengths_G)
    return _relative_to(rewards, rewards.mean())


def grpo_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
    """A_i = (R_i - mean) / (std + 1e-6) with mean and std of the group (GRPO, arXiv 2402.03300, outcome supervision).
    std is the population's: sqrt(sum_j (R_j - mean)^2 / G)."""
    rewards = _checked(rewards_G, lengths_G)
    centred = _relative_to(rewards, rewards.mean())
    return (centred / np.float32(rewards.std() + 1e-6)).astype(np.float32)


def rloo_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
    """A_i = R_i - sum_{j != i} R_j / (G - 1): the mean of the others as baseline (RLOO, arXiv 2402.14740). A group of
    one has no others: zero."""
    rewards = _checked(rewards_G, lengths_G)
    if rewards.size == 1:
        return np.zeros(1, dtype=np.float32)
    return _relative_to(rewards, (rewards.sum() - rewards) / (rewards.size - 1))


def opo_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
    """A_i = R_i - sum_j l_j R_j / sum_j l_j: the baseline of least gradient variance (OPO, arXiv 2505.23585), if the
    gradients of different tokens are about orthogonal and alike in norm."""
    rewards = _checked(rewards_G, lengths_G)
    weights = np.asarray(lengths_G, dtype=np.float64)
    return _relative_to(rewards, (weights * rewards).sum() / weights.sum())


ADVANTAGES: Mapping[str, Advantage] = {
    "default": mean_baseline_advantages,
    "grpo": grpo_advantages,
    "rloo": rloo_advantages,
    "opo": opo_advantages,
}


Penalty = Callable[[Sequence[int]], NDArray[np.float64]]


def soft_overlong_penalty(
    lengths_G: Sequence[int], *, max_length: int, buffer_length: int, weight: float = 1.0
) -> NDArray[np.float64]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), as a positive penalty: 0 up to max_length -
    buffer_length tokens, then linear up to `weight` at max_length."""
    excess = np.asarray(lengths_G, dtype=np.float64) - (max_length - buffer_length)
    return weight * np.clip(excess / buffer_length, 0.0, 1.0)


def per_token_penalty(lengths_G: Sequence[int], *, coefficient: float) -> NDArray[np.float64]:
    return coefficient * np.asarray(lengths_G, dtype=np.float64)


def penalise_length(advantage: Advantage, penalty: Penalty) -> Advantage:
    """`advantage` of the rewards less the penalty."""

    def penalised(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
        return advantage((_checked(rewards_G, lengths_G) - penalty(lengths_G)).tolist(), lengths_G)

    return penalised


def load_custom_advantage(import_path: str, kwargs: Mapping[str, object], *, key: str = "advantage") -> Advantage:
    """A user's function `fn(rewards_G, lengths_G, **kwargs) -> array (G,)`, which gets float64 and int64 arrays. `key`
    is the section in errors. Raises ValueError here for a function that cannot be imported or called so, and from the
    advantage for a result that is not G finite numbers."""
    function = load_function(import_path, kwargs, key=key, positional=("rewards_G", "lengths_G"))

    def custom_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
        rewards = _checked(rewards_G, lengths_G)
        returned = function(rewards, np.asarray(lengths_G, dtype=np.int64), **kwargs)
        try:
            advantages = np.asarray(returned, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{key}.import_path {import_path!r} returned {returned!r:.80}; return an array of numbers"
            ) from error
        if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
            raise ValueError(
                f"{key}.import_path {import_path!r} returned {advantages.tolist()} for the rewards {rewards.tolist()}; "
                f"return a finite number for each of the {rewards.size} rollouts"
            )
        return advantages

    return custom_advantages


def _checked(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float64]:
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0 or len(lengths_G) != rewards.size:
        raise ValueError(f"a group needs a reward and a length a rollout, got {len(rewards_G)} and {len(lengths_G)}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    return rewards


def _relative_to(rewards: NDArray[np.float64], baseline: NDArray[np.float64] | np.floating) -> NDArray[np.float32]:
    if np.ptp(rewards) == 0.0:  # the mean of equal floats can be off by a rounding
        return np.zeros(rewards.shape, dtype=np.float32)
    return (rewards - baseline).astype(np.float32)
