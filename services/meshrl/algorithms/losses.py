"""The policy losses: what a step minimises over its sampled tokens; `objective` calls one for each packed row.

Every loss returns one value a token, neither weighted nor divided: `objective.Objective` chooses the normaliser, whose
count is that of the whole batch over all micro-batches and ranks. So a gradient does not depend on how a batch is cut
into micro-batches. Each docstring names the normaliser of its paper.

Notation: p the probability of the sampled token under the policy that is trained, q under the one that sampled it, A
its advantage, r = p / q. Importance ratios are saturated where |log r| > LOG_RATIO_LIMIT: there they are an accident of
numerics, and their gradient is zero instead of an overflow.

Shapes: N sampled tokens of a row, S sequences in it, L tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

LOG_RATIO_LIMIT = 20.0
"""Nats; a ratio of 5e8."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossInputs:
    """What a loss sees of a row's sampled tokens, sequence after sequence; float32 (N,) where not said otherwise."""

    logprobs: torch.Tensor  # log p; carries the gradient
    inference_logprobs: torch.Tensor  # log q, after the sampling settings (temperature, top-p, ...)
    advantages: torch.Tensor
    sequence_ids: torch.Tensor  # int64 (N,), ascending, below num_sequences
    num_sequences: int  # S; some may have no token here


@dataclass(frozen=True, kw_only=True, eq=False)
class LossOutput:
    """The loss of each token (N,), which tokens the loss kept out of the policy gradient, and what to report."""

    per_token: torch.Tensor
    masked: torch.Tensor  # bool (N,)
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)  # (N,) each, averaged over the step's tokens


Loss = Callable[[LossInputs], LossOutput]


def dppo_kl_loss(inputs: LossInputs, *, mask_low: float, mask_high: float, adv_tau: float, kl_tau: float) -> LossOutput:
    """The default: importance-weighted policy gradient, masked outside a trust region, with a KL term.

        loss = -keep * adv_tau * A * r + kl_tau * (log r)^2
        keep = 0  where A > 0 and p - q > mask_high,
                  or A < 0 and q - p > mask_low,  else 1

    The mask is the binary total-variation variant of DPPO (arXiv 2602.04879, "Rethinking the Trust Region in LLM
    Reinforcement Learning"): unlike a ratio, a difference of probabilities does not punish rare tokens, and only
    moves that lead further away in the direction of the advantage are stopped. The squared log-ratio is the KL term of
    Kimi K2.5 (arXiv 2602.02276); it holds for masked tokens too, so they are pulled back.
    Normaliser: sampled tokens of the whole batch (TOKEN).
    """
    log_ratio_N = inputs.logprobs - inputs.inference_logprobs
    change_N = inputs.logprobs.detach().exp() - inputs.inference_logprobs.exp()
    masked_N = torch.where(
        inputs.advantages > 0, change_N > mask_high, (inputs.advantages < 0) & (change_N < -mask_low)
    )
    ratio_N = saturated_ratio(log_ratio_N)
    gradient_N = torch.where(masked_N, 0.0, adv_tau * inputs.advantages * ratio_N)
    return LossOutput(
        per_token=kl_tau * log_ratio_N.square() - gradient_N, masked=masked_N, metrics={"ratio": ratio_N.detach()}
    )


def aipo_loss(inputs: LossInputs, *, delta: float) -> LossOutput:
    """Token-level AIPO (LlamaRL, arXiv 2505.24034), without its entropy and KL terms.

        loss = -min(r, delta) * A * log p,   no gradient through min(r, delta)

    One-sided clipping corrects for the policy that sampled the token and bounds the variance; where r is below delta
    the gradient is that of -A * r. No token is masked.
    Normaliser: sampled tokens of the whole batch (TOKEN).
    """
    ratio_N = saturated_ratio(inputs.logprobs - inputs.inference_logprobs).detach()
    return LossOutput(
        per_token=-ratio_N.clamp(max=delta) * inputs.advantages * inputs.logprobs,
        masked=_none(inputs),
        metrics={"ratio": ratio_N, "clip_high_fraction": _as_share(ratio_N > delta, inputs)},
    )


def cross_entropy_loss(inputs: LossInputs) -> LossOutput:
    """Supervised fine-tuning: -log p of each token; advantages and sampling logprobs are not looked at.

    Normaliser: loss tokens of the whole batch (TOKEN).
    """
    return LossOutput(per_token=-inputs.logprobs, masked=_none(inputs))


def saturated_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log r) with log r held within LOG_RATIO_LIMIT; finite, and so is its gradient (zero outside)."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _none(inputs: LossInputs) -> torch.Tensor:
    return torch.zeros_like(inputs.logprobs, dtype=torch.bool)


def _as_share(tokens_N: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return tokens_N.to(inputs.logprobs.dtype)
