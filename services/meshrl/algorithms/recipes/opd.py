"""opd: on-policy distillation. The policy samples, a teacher scores every token of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.algorithms.recipes.base import Actor, Recipe, SampleStreams, ScoreRequest, Scores, Streams, TokenScores
from meshrl.wire.types import Rollout, Sample

LEAST_LOGPROB = -20.0
"""Lower logprobs of a teacher count as this, so that one token that it rules out does not drown the others."""


class OnPolicyDistillation(Recipe):
    """ref_kl alone, towards the teacher's logprobs of the policy's own tokens: the reverse KL of the policy from the
    teacher (https://thinkingmachines.ai/blog/on-policy-distillation/), whatever the reward. With `top_k` it is summed
    over the teacher's likeliest tokens at each position instead of sampled. The teacher has the policy's tokenizer."""

    scored_by = Actor.TEACHER
    least_rollouts = 1
    needs_signal = False

    def __init__(self, *, weight: float, top_k: int = 0) -> None:
        self._weight = weight
        self.top_k = top_k

    def score_requests(self, rollouts: Sequence[Rollout]) -> list[ScoreRequest]:
        return [
            ScoreRequest(rollout_id=rollout.rollout_id, place=place, token_ids=sample.token_ids)
            for rollout in rollouts
            for place, sample in enumerate(rollout.samples)
        ]

    def streams(self, rollouts: Sequence[Rollout], scores: Scores) -> Streams:
        return streams_towards(rollouts, scores, weight=self._weight)


def streams_towards(rollouts: Sequence[Rollout], scores: Scores, *, weight: float) -> Streams:
    """The ref_kl stream of every sample. Raises ValueError as `towards` does."""
    return {
        rollout.rollout_id: [
            towards(sample, scores.get((rollout.rollout_id, place)), weight=weight)
            for place, sample in enumerate(rollout.samples)
        ]
        for rollout in rollouts
    }


def towards(sample: Sample, scores: TokenScores | None, *, weight: float) -> SampleStreams:
    """The ref_kl stream of the sampled tokens with a score. Raises ValueError for another temperature than 1, at which
    scores are given."""
    if scores is None:
        return SampleStreams()
    logprobs_T = scores.logprobs
    if abs(sample.temperature - 1.0) > 1e-6:
        raise ValueError(
            f"its rollouts were sampled at temperature {sample.temperature:g}, but scores are of temperature 1; set"
            " orchestrator.sampling.temperature to 1"
        )
    known_T = sample.loss_mask & ~np.isnan(logprobs_T)
    return SampleStreams(
        ref_kl_weights=np.where(known_T, np.float32(weight), np.float32(0.0)).astype(np.float32),
        ref_logprobs=np.where(known_T, np.clip(logprobs_T, LEAST_LOGPROB, 0.0), 0.0).astype(np.float32),
        ref_top_ids=scores.top_ids,
        ref_top_logprobs=None
        if scores.top_logprobs is None
        else np.clip(scores.top_logprobs, LEAST_LOGPROB, 0.0).astype(np.float32),
    )
