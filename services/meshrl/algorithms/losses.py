"""The policy losses: what a step minimises over its loss tokens; called by the trainers once a micro-batch.

Every loss returns one value a token, not yet divided. The learner divides their sum by one normaliser: the number of
loss tokens of the whole batch, over all micro-batches and ranks. So a gradient does not depend on how a batch is cut
into micro-batches, and each token weighs the same whatever the length of its sample.

Shapes: N loss tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class LossInputs:
    """What a loss sees of each loss token, all float32 (N,)."""

    logprobs: torch.Tensor  # under the policy that is trained; carries the gradient
    inference_logprobs: torch.Tensor  # under the policy that sampled it, when it did
    advantages: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LossOutput:
    """The loss of each token (N,), and which tokens the loss kept out of the policy gradient, bool (N,)."""

    per_token: torch.Tensor
    masked: torch.Tensor


Loss = Callable[[LossInputs], LossOutput]


def dppo_kl_loss(inputs: LossInputs, *, mask_low: float, mask_high: float, adv_tau: float, kl_tau: float) -> LossOutput:
    """The default: importance-weighted policy gradient, masked outside a trust region, with a KL term.

    With p the probability of the sampled token under the trained policy, q under the one that sampled it, A its
    advantage and r = p / q:

        loss = -keep * adv_tau * A * r + kl_tau * (log p - log q)^2
        keep = 0  where A > 0 and p - q > mask_high,
                  or A < 0 and q - p > mask_low,  else 1

    The mask is the binary total-variation variant of DPPO (arXiv 2602.04879, "Rethinking the Trust Region in LLM
    Reinforcement Learning"): unlike a ratio, a difference of probabilities does not punish rare tokens, and only
    moves that lead further away in the direction of the advantage are stopped. The squared log-ratio is the KL term of
    Kimi K2.5 (arXiv 2602.02276); it holds for masked tokens too, so they are pulled back.
    Normaliser: loss tokens of the whole batch across ranks.
    """
    log_ratio_N = inputs.logprobs - inputs.inference_logprobs
    change_N = inputs.logprobs.detach().exp() - inputs.inference_logprobs.exp()
    masked_N = torch.where(
        inputs.advantages > 0, change_N > mask_high, (inputs.advantages < 0) & (change_N < -mask_low)
    )
    gradient_N = torch.where(masked_N, 0.0, adv_tau * inputs.advantages * log_ratio_N.exp())
    return LossOutput(per_token=kl_tau * log_ratio_N.square() - gradient_N, masked=masked_N)


def aipo_loss(inputs: LossInputs, *, delta: float) -> LossOutput:
    """Token-level AIPO (LlamaRL, arXiv 2505.24034), without its entropy and KL terms.

        loss = -min(r, delta) * A * log p,   r = p / q, no gradient through min(r, delta)

    One-sided clipping corrects for the policy that sampled the token and bounds the variance; where r is below delta
    the gradient is that of -A * r. No token is masked.
    Normaliser: loss tokens of the whole batch across ranks.
    """
    with torch.no_grad():
        weight_N = (inputs.logprobs - inputs.inference_logprobs).exp().clamp(max=delta)
    return LossOutput(
        per_token=-weight_N * inputs.advantages * inputs.logprobs,
        masked=torch.zeros_like(inputs.advantages, dtype=torch.bool),
    )


def cross_entropy_loss(inputs: LossInputs) -> LossOutput:
    """Supervised fine-tuning: -log p of each token; advantages and sampling logprobs are not looked at.

    Normaliser: loss tokens of the whole batch across ranks.
    """
    return LossOutput(per_token=-inputs.logprobs, masked=torch.zeros_like(inputs.logprobs, dtype=torch.bool))
