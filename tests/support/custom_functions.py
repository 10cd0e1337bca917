"""A user's own advantage, loss and algorithm, as their import paths would name them; some break the contract."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.algorithms.losses import SequenceInputs, SequenceLoss
from meshrl.algorithms.recipes.base import Recipe, SampleStreams, Scores, Streams
from meshrl.wire.types import Rollout


def importance_weighted(sequence: SequenceInputs, *, scale: float = 1.0) -> SequenceLoss:
    ratio = (sequence.logprobs - sequence.inference_logprobs).exp()
    return SequenceLoss(
        loss=-scale * (ratio * sequence.advantages).sum(),
        metrics={"length": float(len(sequence.logprobs)), "ratio_max": ratio.max()},
    )


def returns_a_tensor(sequence: SequenceInputs) -> torch.Tensor:
    return sequence.logprobs.sum()


def forgets_to_sum(sequence: SequenceInputs) -> SequenceLoss:
    return SequenceLoss(loss=sequence.logprobs)


def reports_a_reserved_name(sequence: SequenceInputs) -> SequenceLoss:
    return SequenceLoss(loss=sequence.logprobs.sum(), metrics={"ce": 1.0})


def best_of_group(rewards: NDArray[np.float64], lengths: NDArray[np.int64], *, scale: float = 1.0) -> list[float]:
    return [
        scale * float(reward == rewards.max() and length > 0) for reward, length in zip(rewards, lengths, strict=True)
    ]


def one_for_all(rewards: NDArray[np.float64], lengths: NDArray[np.int64]) -> float:
    return 1.0


NOT_A_FUNCTION = 3


class Imitate(Recipe):
    """An algorithm of a user's own: cross-entropy on rollouts that got at least `least`."""

    least_rollouts = 1
    needs_signal = False

    def __init__(self, least: float) -> None:
        self._least = least

    def streams(self, rollouts: Sequence[Rollout], scores: Scores) -> Streams:
        return {
            rollout.rollout_id: [
                SampleStreams(ce_weights=sample.loss_mask.astype(np.float32))
                if rollout.reward >= self._least
                else SampleStreams()
                for sample in rollout.samples
            ]
            for rollout in rollouts
        }
