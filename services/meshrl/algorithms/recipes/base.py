"""The interface of an algorithm (a recipe): who samples, which tokens another model scores, what each token trains.

Packing and trainer know the terms of the objective and no algorithm.

Shapes: T tokens of a sample, C tokens of context before it, K candidates of a token.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshrl.wire.types import Rollout


class Actor(enum.Enum):
    POLICY = "policy"
    """With the newest weights that its engines serve."""
    TEACHER = "teacher"
    """Another one, whose weights stay as they are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRequest:
    """A sample whose tokens are to be scored: the logprob of each after those before it, at temperature 1."""

    rollout_id: str
    place: int
    """Of the sample in the rollout."""
    token_ids: NDArray[np.int32]  # (C + T,)
    context: int = 0
    """C: tokens before the sample's own, for the scoring model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenScores:
    logprobs: NDArray[np.float32]  # (T,) NaN for a token that has none, as the first of a sequence
    top_ids: NDArray[np.int32] | None = None  # (T, K) the likeliest tokens in the place of each; -1: none
    top_logprobs: NDArray[np.float32] | None = None  # (T, K) with top_ids


Scores = Mapping[tuple[str, int], TokenScores]
"""By rollout id and place of the sample."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleStreams:
    """The training of one sample; a term without a token stays None."""

    advantage: float | None = None
    """rl: of each sampled token."""
    ce_weights: NDArray[np.float32] | None = None  # (T,)
    ref_kl_weights: NDArray[np.float32] | None = None  # (T,)
    ref_logprobs: NDArray[np.float32] | None = None  # (T,) with ref_kl_weights
    ref_top_ids: NDArray[np.int32] | None = None  # (T, K) candidates of the ref_kl tokens, each once; -1: none
    ref_top_logprobs: NDArray[np.float32] | None = None  # (T, K) with ref_top_ids


Streams = Mapping[str, Sequence[SampleStreams]]
"""By rollout id, one for each of its samples, in order."""


class Recipe:
    """Subclasses; `type = "custom"` takes any by its import path."""

    sampler: Actor = Actor.POLICY
    scored_by: Actor | None = None
    """None: nothing is scored."""
    top_k: int = 0
    """Likeliest tokens in the place of each that are scored, too."""
    least_rollouts: int = 2
    """A group with fewer left is dropped: by default, rollouts of a task are compared."""
    needs_signal: bool = True
    """Whether a group of equal rewards trains nothing: filters.zero_signal drops it."""

    def score_requests(self, rollouts: Sequence[Rollout]) -> list[ScoreRequest]:
        return []

    def streams(self, rollouts: Sequence[Rollout], scores: Scores) -> Streams:
        """What each sample of a group trains; `scores` answer `score_requests`. Called once for each group of a step,
        in order. Raises ValueError, which ends the run, for rollouts that do not fit."""
        raise NotImplementedError

    def state(self) -> Mapping[str, float]:
        """Its memory from step to step, kept with each batch for a restart."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Takes up a `state`."""


def by_agent(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    agents: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        agents.setdefault(rollout.agent, []).append(rollout)
    return agents


def sampled_tokens(rollout: Rollout) -> int:
    return int(sum(np.count_nonzero(sample.loss_mask) for sample in rollout.samples))


def with_advantages(rollouts: Sequence[Rollout], advantages: Mapping[str, float]) -> Streams:
    return {
        rollout.rollout_id: [SampleStreams(advantage=advantages[rollout.rollout_id])] * len(rollout.samples)
        for rollout in rollouts
    }
