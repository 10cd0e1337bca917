"""sft: a teacher plays the rollouts and the policy imitates them by cross-entropy (hard distillation)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.algorithms.recipes.base import Actor, Recipe, SampleStreams, Scores, Streams
from meshrl.wire.types import Rollout


class Imitation(Recipe):
    """ce alone, on the teacher's tokens in rollouts of at least `min_reward`; None takes all of them."""

    sampler = Actor.TEACHER
    least_rollouts = 1
    needs_signal = False

    def __init__(self, *, weight: float, min_reward: float | None) -> None:
        self._weight = weight
        self._min_reward = min_reward

    def streams(self, rollouts: Sequence[Rollout], scores: Scores) -> Streams:
        return {
            rollout.rollout_id: [
                SampleStreams(ce_weights=np.where(sample.loss_mask, self._weight, 0.0).astype(np.float32))
                if self._min_reward is None or rollout.reward >= self._min_reward
                else SampleStreams()
                for sample in rollout.samples
            ]
            for rollout in rollouts
        }
