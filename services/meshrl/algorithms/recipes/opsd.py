"""opsd: on-policy self-distillation. The policy is its own teacher: its tokens are scored after a better attempt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.algorithms.recipes.base import Actor, Recipe, ScoreRequest, Scores, Streams, by_agent
from meshrl.algorithms.recipes.opd import streams_towards
from meshrl.wire.types import Rollout


class SelfDistillation(Recipe):
    """ref_kl alone, towards the policy's own logprobs of the same tokens after a demonstration (SDFT, arXiv
    2601.19897). Unlike the paper's moving average, the teacher is the live policy, or with `scored_by` TEACHER the
    run's first weights.

    The demonstration is the best rollout of the same task and agent in the group, put before the sample. A rollout
    without a better one, or too long for both within `context_tokens`, trains nothing.
    """

    def __init__(self, *, weight: float, context_tokens: int, top_k: int = 0, scored_by: Actor = Actor.POLICY) -> None:
        self._weight = weight
        self.top_k = top_k
        self.scored_by = scored_by
        self._context_tokens = context_tokens

    def score_requests(self, rollouts: Sequence[Rollout]) -> list[ScoreRequest]:
        requests = []
        for members in by_agent(rollouts).values():
            best = max(members, key=lambda rollout: rollout.reward)  # the first of the best
            if not best.samples:
                continue
            shown_C = best.samples[-1].token_ids
            requests += [
                ScoreRequest(
                    rollout_id=rollout.rollout_id,
                    place=place,
                    token_ids=np.concatenate([shown_C, sample.token_ids]),
                    context=len(shown_C),
                )
                for rollout in members
                if rollout.reward < best.reward
                for place, sample in enumerate(rollout.samples)
                if len(shown_C) + len(sample.token_ids) <= self._context_tokens
            ]
        return requests

    def streams(self, rollouts: Sequence[Rollout], scores: Scores) -> Streams:
        return streams_towards(rollouts, scores, weight=self._weight)
