"""What a step minimises: an rl, a ce and a ref_kl term, each a weighted sum over its tokens divided by its own count.

The learner calls `count` once for the whole batch and `objective_loss` once for each packed row. The counts are those
of all micro-batches and ranks, so the rows' losses add up to the objective, and no term changes another.

    rl      sum_t rl_weight_t * w_t * loss_t / D                     loss_t: one of `losses`
            TOKEN     w = 1                                 D = rl tokens
            SEQUENCE  w = 1 / rl tokens of its sequence     D = sequences with rl tokens
            FIXED     w = 1 / fixed_length                  D = sequences with rl tokens
    ce      sum_t ce_weight_t * -log p_t / ce tokens
    ref_kl  ref_kl_tau * sum_t ref_kl_weight_t * d_t / ref_kl tokens
            sampled      d_t = sg(min(r_t, ref_kl_delta)) * (log p_t - log ref_t)^2 / 2
            candidates   d_t = sum_k p_k * (log p_k - log ref_k) + p_rest * (log p_rest - log ref_rest)

The sampled ref_kl is the k2 estimator (http://joschu.net/blog/kl-approx.html): its expected on-policy gradient is that
of KL(p || ref) (arXiv 2510.01555). r corrects for the policy that sampled the token; a token that no policy sampled has
r = 1.

A token with candidates, the reference's likeliest tokens in its place, has the KL over these and all other tokens as
one: at most the whole KL(p || ref), without variance from sampling and without r.

Shapes: P predicted tokens of a row (of any term), N those of the rl term, S sequences of the row, K candidates.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.algorithms.losses import Loss, LossInputs, LossOutput, saturated_ratio
from meshrl.wire.types import MicroBatch

LEAST_REST = 1e-6
"""Least probability of all tokens that are no candidates: below, it is rounding of float32 logprobs."""


class Normaliser(enum.Enum):
    """The divisor of the rl tokens' losses; see above."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    FIXED = "fixed"


@dataclass(frozen=True, kw_only=True)
class BatchCounts:
    rl_tokens: int
    rl_sequences: int
    ce_tokens: int
    ref_kl_tokens: int


@dataclass(frozen=True, kw_only=True)
class Objective:
    loss: Loss
    normaliser: Normaliser = Normaliser.TOKEN
    fixed_length: int | None = None  # tokens; with FIXED only
    ref_kl_tau: float = 1.0
    ref_kl_delta: float = 4.0

    def rl_divisor(self, counts: BatchCounts) -> int:
        return counts.rl_tokens if self.normaliser is Normaliser.TOKEN else counts.rl_sequences


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTokens:
    """The predicted tokens of a row, sequence after sequence; float32 (P,) by default. A term without tokens has None
    as weights."""

    logprobs: torch.Tensor  # log p; carries the gradient
    inference_logprobs: torch.Tensor  # log q; read where rl_mask or sampled is true
    advantages: torch.Tensor  # read where rl_mask is true
    rl_mask: torch.Tensor  # bool (P,): sampled, so part of the rl term
    sequence_ids: torch.Tensor  # int64 (P,), ascending, below num_sequences
    num_sequences: int  # S
    rl_weights: torch.Tensor | None = None
    ce_weights: torch.Tensor | None = None
    ref_kl_weights: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None  # log ref; read where ref_kl_weights is not 0
    sampled: torch.Tensor | None = None  # bool (P,) tokens that have a log q; None: those of rl_mask
    ref_top_ids: torch.Tensor | None = None  # int (P, K) candidates of ref_kl tokens; -1: none
    ref_top_logprobs: torch.Tensor | None = None  # (P, K) log ref_k; read where ref_top_ids is not -1
    candidate_logprobs: torch.Tensor | None = None  # (P, K) log p_k, carries the gradient; read as ref_top_logprobs
    rl_at: torch.Tensor | None = None  # int64: where rl_mask is true. None: the host waits for the device to find it
    ce_at: torch.Tensor | None = None  # the same of ce_weights that are not 0


@dataclass(frozen=True, kw_only=True, eq=False)
class RowLoss:
    """A row's share of the objective; the shares of all rows of all ranks add up to it.

    `total` is a scalar ready for backward, even when it is 0. The rest has no gradient. `masked`, bool (P,), has the
    tokens that the rl loss masked. `metrics` holds scalars to add up over rows and ranks: "rl", "ce" and "ref_kl"
    (absent where the batch has no token of one) and the rl loss's own (means over the rl tokens).
    """

    total: torch.Tensor
    masked: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


def count(micro_batches: Iterable[MicroBatch]) -> BatchCounts:
    """Of all micro-batches, those of other ranks too."""
    rl_tokens = rl_sequences = ce_tokens = ref_kl_tokens = 0
    for micro_batch in micro_batches:
        lengths = np.diff(micro_batch.sample_offsets)
        ids = np.repeat(np.arange(len(lengths)), lengths)[micro_batch.loss_mask]
        rl_tokens += len(ids)
        rl_sequences += len(np.unique(ids))
        ce_tokens += _weighted(micro_batch.ce_weights)
        ref_kl_tokens += _weighted(micro_batch.ref_kl_weights)
    return BatchCounts(rl_tokens=rl_tokens, rl_sequences=rl_sequences, ce_tokens=ce_tokens, ref_kl_tokens=ref_kl_tokens)


def objective_loss(objective: Objective, row: RowTokens, counts: BatchCounts) -> RowLoss:
    """`counts` are the whole batch's, not the row's."""
    total = row.logprobs[:0].sum()  # 0 with a graph: a rank whose row has no token still takes part in backward
    masked_P = torch.zeros_like(row.rl_mask)
    metrics: dict[str, torch.Tensor] = {}
    terms: dict[str, torch.Tensor] = {}
    if counts.rl_tokens > 0:
        at_N = _indexes(row.rl_mask) if row.rl_at is None else row.rl_at
        output, value_N = _rl_values(objective, row, at_N)
        terms["rl"] = value_N.sum() / objective.rl_divisor(counts)
        masked_P[at_N] = output.masked
        metrics |= {name: values.detach().sum() / counts.rl_tokens for name, values in output.metrics.items()}
    if counts.ce_tokens > 0 and row.ce_weights is not None:
        at = _indexes(row.ce_weights != 0) if row.ce_at is None else row.ce_at
        terms["ce"] = -(row.ce_weights[at] * row.logprobs.index_select(0, at)).sum() / counts.ce_tokens
    if counts.ref_kl_tokens > 0 and row.ref_kl_weights is not None:
        terms["ref_kl"] = _ref_kl_sum(objective, row, row.ref_kl_weights) / counts.ref_kl_tokens
    for name, term in terms.items():
        total = total + term
        metrics[name] = term.detach()
    return RowLoss(total=total, masked=masked_P, metrics=metrics)


def _rl_values(objective: Objective, row: RowTokens, at_N: torch.Tensor) -> tuple[LossOutput, torch.Tensor]:
    ids_N = row.sequence_ids[at_N]
    inputs = LossInputs(
        logprobs=row.logprobs.index_select(0, at_N),
        inference_logprobs=row.inference_logprobs[at_N],
        advantages=row.advantages[at_N],
        sequence_ids=ids_N,
        num_sequences=row.num_sequences,
    )
    output = objective.loss(inputs)
    value_N = output.per_token
    if objective.normaliser is Normaliser.SEQUENCE:
        value_N = value_N / torch.bincount(ids_N, minlength=row.num_sequences)[ids_N]
    elif objective.fixed_length is not None:
        value_N = value_N / objective.fixed_length
    if row.rl_weights is not None:
        value_N = value_N * row.rl_weights[at_N]
    return output, value_N


def _ref_kl_sum(objective: Objective, row: RowTokens, weights_P: torch.Tensor) -> torch.Tensor:
    at = _indexes(weights_P != 0)
    if row.ref_logprobs is None:
        raise ValueError("ref_kl_weights need ref_logprobs: the reference's logprobs of the same tokens")
    logprobs = row.logprobs.index_select(0, at)
    ratio = saturated_ratio(logprobs - row.inference_logprobs[at]).detach().clamp(max=objective.ref_kl_delta)
    ratio = torch.where((row.rl_mask if row.sampled is None else row.sampled)[at], ratio, 1.0)
    divergence = ratio * (logprobs - row.ref_logprobs[at]).square() / 2
    if row.ref_top_ids is not None and row.ref_top_logprobs is not None and row.candidate_logprobs is not None:
        given_NK = row.ref_top_ids[at] >= 0
        over_all = candidate_kl(row.candidate_logprobs.index_select(0, at), row.ref_top_logprobs[at], given_NK)
        divergence = torch.where(given_NK.any(1), over_all, divergence)
    return objective.ref_kl_tau * (weights_P[at] * divergence).sum()


def candidate_kl(logprobs_NK: torch.Tensor, reference_NK: torch.Tensor, given_NK: torch.Tensor) -> torch.Tensor:
    """(N,) KL(p || ref) over the given candidates and all other tokens as one, in nats; computed in float64."""
    logp_NK = torch.where(given_NK, logprobs_NK.double(), -torch.inf)
    logref_NK = torch.where(given_NK, reference_NK.double(), -torch.inf)
    kl_NK = torch.where(given_NK, logp_NK.exp() * (logprobs_NK.double() - reference_NK.double()), 0.0)
    rest_N, ref_rest_N = ((1.0 - values.exp().sum(1)).clamp(min=LEAST_REST) for values in (logp_NK, logref_NK))
    return (kl_NK.sum(1) + rest_N * (rest_N.log() - ref_rest_N.log())).to(logprobs_NK.dtype)


def _indexes(mask_P: torch.Tensor) -> torch.Tensor:
    """Found once for several columns, since a device makes the host wait for the number."""
    return mask_P.nonzero().squeeze(1)


def _weighted(weights_T: NDArray[np.float32] | None) -> int:
    return 0 if weights_T is None else int(np.count_nonzero(weights_T))
