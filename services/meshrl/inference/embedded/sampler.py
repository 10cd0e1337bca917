"""Draws one token for each row of logits; the last part of an engine's step, after logits that a request reweights.

Each request owns a counter-based stream of uniforms: the n-th uniform is a hash of (seed, n), so a request's draws
depend on its seed and its own distribution alone. A uniform becomes a token by inverting the cumulative distribution.
Shapes: B rows, V tokens of the vocabulary, K alternatives, C rows with some cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.inference.embedded.slots import SlotTable, StepOutput

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def stream_keys(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Start of each seed's stream; mixed first so that neighbouring seeds do not run through overlapping states."""
    return _mix(_mix(seeds + _GAMMA) ^ _GAMMA)


def uniforms(keys: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The counter-th uniform in [0, 1) of each stream, with 53 bits."""
    bits = _mix(keys + (counters + np.uint64(1)) * _GAMMA) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchSampling:
    """Parameters of B rows, rebuilt when a row joins, leaves or moves. None: no row needs this part.

    `top_k` is V for rows that keep every token; `greedy` marks rows that take the most likely token.
    """

    temperature: torch.Tensor | None = None  # (B, 1)
    greedy: torch.Tensor | None = None  # (B,)
    cut_rows: torch.Tensor | None = None  # (C,) rows with any cut; the next three are of these rows only
    min_p: torch.Tensor | None = None  # (C, 1)
    top_k: torch.Tensor | None = None  # (C, 1)
    top_p: torch.Tensor | None = None  # (C, 1)
    num_alternatives: int = 0
    raw: bool = False


def reweight(logits_RV: torch.Tensor, table: SlotTable, slots: Sequence[int]) -> torch.Tensor:
    """A copy of the logits in float32, with logit_bias and penalties of the decoding rows in `slots` applied.

    In vLLM's order and by its formulas. Repetition counts prompt and completion (arXiv 1909.05858), presence and
    frequency the completion alone. Shapes: R rows, U different tokens of one row.
    """
    reweighted_RV = logits_RV.to(torch.float32, copy=True)
    for slot in slots:
        params = table.rows[slot].request.sampling
        logits_V = reweighted_RV[slot]
        if params.logit_bias:
            ids_U = torch.tensor(list(params.logit_bias), device=logits_V.device)
            logits_V[ids_U] += torch.tensor(list(params.logit_bias.values()), device=logits_V.device)
        if not params.penalised:
            continue
        prompt, made = table.sequence(slot)
        if params.repetition_penalty != 1.0:
            seen_U = torch.from_numpy(np.union1d(prompt, made).astype(np.int64)).to(logits_V.device)
            values_U = logits_V[seen_U]
            logits_V[seen_U] = torch.where(
                values_U > 0, values_U / params.repetition_penalty, values_U * params.repetition_penalty
            )
        made_U, counts_U = np.unique(made, return_counts=True)
        ids_U = torch.from_numpy(made_U.astype(np.int64)).to(logits_V.device)
        times_U = torch.from_numpy(counts_U.astype(np.float32)).to(logits_V.device)
        logits_V[ids_U] -= params.frequency_penalty * times_U + params.presence_penalty
    return reweighted_RV


def sample(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor, how: BatchSampling, plain_BV: torch.Tensor | None = None
) -> StepOutput:
    """Draws a token for each row; `uniforms_B` are float64 in [0, 1) on the device of the logits."""
    logits_BV = logits_BV.float()
    raw_BV = (logits_BV if plain_BV is None else plain_BV.float()).log_softmax(-1) if how.raw else None
    scaled_BV = logits_BV if how.temperature is None else logits_BV / how.temperature
    if how.cut_rows is not None:
        scaled_BV = _cut(scaled_BV, how)
    logprobs_BV = scaled_BV.log_softmax(-1)
    token_ids_B1 = _invert(logprobs_BV, uniforms_B)
    if how.greedy is not None:
        best_B1 = logits_BV.argmax(-1, keepdim=True)
        token_ids_B1 = torch.where(how.greedy[:, None], best_B1, token_ids_B1)
    top_ids_BK = top_logprobs_BK = None
    if how.num_alternatives:
        top_logprobs_BK, top_ids_BK = logprobs_BV.topk(min(how.num_alternatives, logprobs_BV.shape[-1]), dim=-1)
    return StepOutput(
        token_ids=token_ids_B1[:, 0].cpu().numpy(),
        logprobs=logprobs_BV.gather(-1, token_ids_B1)[:, 0].cpu().numpy(),
        raw_logprobs=None if raw_BV is None else raw_BV.gather(-1, token_ids_B1)[:, 0].cpu().numpy(),
        top_ids=None if top_ids_BK is None else top_ids_BK.cpu().numpy(),
        top_logprobs=None if top_logprobs_BK is None else top_logprobs_BK.cpu().numpy(),
    )


def _invert(logprobs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """(B, 1) first token whose cumulative probability exceeds the uniform; in float64, so that no token of probability
    zero is hit."""
    cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    target_B1 = torch.minimum(uniforms_B[:, None] * total_B1, total_B1 * (1.0 - 2.0**-52))
    return torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=logprobs_BV.shape[-1] - 1)


def _cut(scaled_BV: torch.Tensor, how: BatchSampling) -> torch.Tensor:
    """Removes tokens by min_p, then top_k, then top_p (vLLM's order); ties with the last kept token stay."""
    assert how.cut_rows is not None
    cut_CV = scaled_BV[how.cut_rows]
    if how.min_p is not None:
        floor_C1 = cut_CV.amax(-1, keepdim=True) + how.min_p.log()
        cut_CV = cut_CV.masked_fill(cut_CV < floor_C1, -torch.inf)
    if how.top_k is not None or how.top_p is not None:
        ranked_CV = cut_CV.sort(-1, descending=True).values
        least_C1 = torch.full_like(ranked_CV[:, :1], -torch.inf)
        if how.top_k is not None:
            least_C1 = ranked_CV.gather(-1, how.top_k - 1)
            ranked_CV = ranked_CV.masked_fill(ranked_CV < least_C1, -torch.inf)
        if how.top_p is not None:
            mass_CV = ranked_CV.softmax(-1)
            before_CV = mass_CV.cumsum(-1) - mass_CV
            kept_C1 = (before_CV < how.top_p).sum(-1, keepdim=True).clamp_(min=1)
            least_C1 = torch.maximum(least_C1, ranked_CV.gather(-1, kept_C1 - 1))
        cut_CV = cut_CV.masked_fill(cut_CV < least_C1, -torch.inf)
    return scaled_BV.index_copy(0, how.cut_rows, cut_CV)
