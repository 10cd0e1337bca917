"""echo: rl as grpo, and cross-entropy on the environment's answers: the policy learns to expect observations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshrl.algorithms.advantages import Advantage
from meshrl.algorithms.recipes.base import Scores, Streams
from meshrl.algorithms.recipes.grpo import GRPO
from meshrl.wire.types import Rollout, Sample


class Echo(GRPO):
    """Each content token of messages of `roles` has `weight` in the ce term.

    Markup of the chat template, if the renderer marks it, is left out: the policy never writes it. A group of equal
    rewards still has observations to learn.
    """

    least_rollouts = 1
    needs_signal = False

    def __init__(self, advantage: Advantage, *, roles: Collection[str], weight: float) -> None:
        super().__init__(advantage)
        self._roles = frozenset(roles)
        self._weight = weight

    def streams(self, rollouts: Sequence[Rollout], scores: Scores) -> Streams:
        acted = super().streams(rollouts, scores)
        return {
            rollout.rollout_id: [
                replace(streams, ce_weights=self._observed(sample))
                for streams, sample in zip(acted[rollout.rollout_id], rollout.samples, strict=True)
            ]
            for rollout in rollouts
        }

    def _observed(self, sample: Sample) -> NDArray[np.float32]:
        """(T,) weights of observed tokens."""
        weights_T = np.zeros(len(sample.token_ids), dtype=np.float32)
        for span in sample.message_spans:
            if span.role in self._roles:
                start = span.start if span.content_start is None else span.content_start
                end = span.end if span.content_end is None else span.content_end
                weights_T[start:end] = self._weight
        weights_T[sample.loss_mask] = 0.0
        return weights_T
