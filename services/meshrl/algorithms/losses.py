"""The policy losses: what a step minimises over its sampled tokens; `objective` calls one for each packed row.

Every loss returns one value a token, neither weighted nor divided: `objective.Objective` chooses the normaliser, a
count of the whole batch, so a gradient does not depend on how a batch is cut into micro-batches. Each docstring names
the normaliser of its paper.

Notation: p the probability of the sampled token under the policy that is trained, q under the one that sampled it, A
its advantage, r = p / q. Where |log r| > LOG_RATIO_LIMIT, an accident of numerics, ratios are saturated and have no
gradient.

Shapes: N sampled tokens of a row, S sequences in it, L tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshrl.algorithms.imports import load_function

LOG_RATIO_LIMIT = 20.0
"""Nats; a ratio of 5e8."""

RESERVED_METRICS = frozenset({"rl", "ce", "ref_kl", "total", "mean"})
"""Names of the objective and its terms."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossInputs:
    """A row's sampled tokens, sequence after sequence; float32 (N,) by default."""

    logprobs: torch.Tensor  # log p; carries the gradient
    inference_logprobs: torch.Tensor  # log q, after the sampling settings (temperature, top-p, ...)
    advantages: torch.Tensor
    sequence_ids: torch.Tensor  # int64 (N,), ascending, below num_sequences
    num_sequences: int  # S; some may have no token here


@dataclass(frozen=True, kw_only=True, eq=False)
class LossOutput:
    """Each token's loss (N,), the tokens kept out of the policy gradient, and metrics."""

    per_token: torch.Tensor
    masked: torch.Tensor  # bool (N,)
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)  # (N,) each, averaged over the step's tokens


Loss = Callable[[LossInputs], LossOutput]


def dppo_kl_loss(inputs: LossInputs, *, mask_low: float, mask_high: float, adv_tau: float, kl_tau: float) -> LossOutput:
    """The default: importance-weighted policy gradient, masked outside a trust region, with a KL term.

        loss = -keep * adv_tau * A * r + kl_tau * (log r)^2
        keep = 0  where A > 0 and p - q > mask_high,
                  or A < 0 and q - p > mask_low,  else 1

    The mask is the binary total-variation variant of DPPO (arXiv 2602.04879): unlike a ratio, a difference of
    probabilities does not punish rare tokens, and only moves that lead further away are stopped. The squared log-ratio
    is the KL term of Kimi K2.5 (arXiv 2602.02276); it holds for masked tokens too, so they are pulled back. Normaliser:
    TOKEN.
    """
    log_ratio_N = _log_ratio(inputs)
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

    One-sided clipping corrects for the policy that sampled the token and bounds the variance. No token is masked.
    Normaliser: TOKEN.
    """
    ratio_N = saturated_ratio(_log_ratio(inputs)).detach()
    return LossOutput(
        per_token=-ratio_N.clamp(max=delta) * inputs.advantages * inputs.logprobs,
        masked=_none(inputs),
        metrics={"ratio": ratio_N, "clip_high_fraction": _as_share(ratio_N > delta, inputs)},
    )


def grpo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """PPO's clipped surrogate as in GRPO (arXiv 2402.03300), with the two bounds of clip-higher (DAPO, 2503.14476).

        loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    A clipped token (A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low) has no gradient and counts as masked.
    For A < 0 there is no upper bound on r, as in the papers. GRPO's KL term to a reference is the objective's ref_kl.
    Normaliser: SEQUENCE in GRPO, TOKEN in DAPO, FIXED in Dr. GRPO (2503.20783).
    """
    return _clipped_surrogate(inputs, saturated_ratio(_log_ratio(inputs)), clip_low, clip_high)


def gspo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """GSPO (arXiv 2507.18071): the clipped surrogate with one ratio a sequence.

        s = exp(mean over the sequence's tokens of log r)
        loss = -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)   for each token of the sequence

    The gradient flows through s to all its tokens; those of a clipped sequence count as masked. The mean is taken in
    float64: the clip bounds of the paper (3e-4 and 4e-4) are small. Normaliser: SEQUENCE, which cancels the repetition.
    """
    ids_N = inputs.sequence_ids
    lengths_S = torch.bincount(ids_N, minlength=inputs.num_sequences).clamp(min=1)
    log_ratio_N = _log_ratio(inputs)
    sums_S = torch.zeros(inputs.num_sequences, dtype=torch.float64, device=log_ratio_N.device)
    means_S = sums_S.index_add(0, ids_N, log_ratio_N.double()) / lengths_S
    return _clipped_surrogate(inputs, saturated_ratio(means_S)[ids_N].to(log_ratio_N.dtype), clip_low, clip_high)


def cispo_loss(inputs: LossInputs, *, clip_high: float, clip_low: float | None = None) -> LossOutput:
    """CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE with a clipped, detached importance ratio.

        loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log p

    Unlike PPO's, the clip bounds a weight and stops no gradient, so no token is masked. The paper leaves the lower
    bound open: clip_low None. Normaliser: the tokens of the group in the paper, of the whole batch here (TOKEN).
    """
    ratio_N = saturated_ratio(_log_ratio(inputs)).detach()
    floor = 0.0 if clip_low is None else 1.0 - clip_low
    return LossOutput(
        per_token=-ratio_N.clamp(floor, 1.0 + clip_high) * inputs.advantages * inputs.logprobs,
        masked=_none(inputs),
        metrics={
            "ratio": ratio_N,
            "clip_low_fraction": _as_share(ratio_N < floor, inputs),
            "clip_high_fraction": _as_share(ratio_N > 1.0 + clip_high, inputs),
        },
    )


def cross_entropy_loss(inputs: LossInputs) -> LossOutput:
    """-log p of each token, whatever its advantage."""
    return LossOutput(per_token=-inputs.logprobs, masked=_none(inputs))


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceInputs:
    """A custom loss gets the sampled tokens of one sequence, float32 (L,) each."""

    logprobs: torch.Tensor  # log p; carries the gradient
    inference_logprobs: torch.Tensor  # log q
    advantages: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceLoss:
    """A custom loss returns a scalar, the sum over the sequence's tokens, and scalars to report."""

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor | float] = field(default_factory=dict)


def load_custom_loss(import_path: str, kwargs: Mapping[str, object], *, key: str = "loss") -> Loss:
    """A user's function `fn(SequenceInputs, **kwargs) -> SequenceLoss` as a loss; it is called once a sequence.

    A sequence's loss, like its metrics, is spread evenly over its tokens, so that every normaliser keeps its meaning.
    No token counts as masked. `key` is the section in errors. Raises ValueError here for a function that cannot be
    imported or called so, and from the loss for another result.
    """
    function = load_function(import_path, kwargs, key=key, positional=("sequence",))

    def custom_loss(inputs: LossInputs) -> LossOutput:
        _, lengths = torch.unique_consecutive(inputs.sequence_ids, return_counts=True)
        sizes: list[int] = lengths.tolist()
        own = inputs.logprobs
        columns = (torch.split(tensor, sizes) for tensor in (own, inputs.inference_logprobs, inputs.advantages))
        results = [
            _checked(
                function(SequenceInputs(logprobs=logp_L, inference_logprobs=logq_L, advantages=adv_L), **kwargs),
                f"{key}.import_path {import_path!r}",
            )
            for logp_L, logq_L, adv_L in zip(*columns, strict=True)
        ]
        names = dict.fromkeys(name for result in results for name in result.metrics)

        def over_tokens(scalars: Sequence[torch.Tensor | float]) -> torch.Tensor:
            spread = [torch.as_tensor(scalar).to(own).expand(size) for scalar, size in zip(scalars, sizes, strict=True)]
            return torch.cat([own[:0], *spread])

        return LossOutput(
            per_token=over_tokens([result.loss / size for result, size in zip(results, sizes, strict=True)]),
            masked=_none(inputs),
            metrics={
                name: over_tokens([result.metrics.get(name, 0.0) for result in results]).detach() for name in names
            },
        )

    return custom_loss


def _checked(result: object, where: str) -> SequenceLoss:
    if not isinstance(result, SequenceLoss):
        raise ValueError(f"{where} returned {type(result).__name__}; return a meshrl.algorithms.losses.SequenceLoss")
    if not isinstance(result.loss, torch.Tensor) or result.loss.ndim != 0:
        raise ValueError(
            f"{where} returned a loss that is no scalar tensor ({result.loss!r:.80}); sum it over the sequence's tokens"
        )
    for name, value in result.metrics.items():
        if not isinstance(value, torch.Tensor | float | int):
            raise ValueError(f"{where} reports {value!r:.80} as {name}; a metric is a number or a scalar tensor")
    reserved = sorted(RESERVED_METRICS & set(result.metrics))
    if reserved:
        raise ValueError(f"{where} reports {', '.join(reserved)}, which name the objective and its terms; rename it")
    return result


def _log_ratio(inputs: LossInputs) -> torch.Tensor:
    return inputs.logprobs - inputs.inference_logprobs


def _clipped_surrogate(inputs: LossInputs, ratio_N: torch.Tensor, clip_low: float, clip_high: float) -> LossOutput:
    """A clipped token's ratio is out of the graph."""
    high_N = (inputs.advantages > 0) & (ratio_N > 1.0 + clip_high)
    low_N = (inputs.advantages < 0) & (ratio_N < 1.0 - clip_low)
    bounded_N = torch.where(high_N, 1.0 + clip_high, torch.where(low_N, 1.0 - clip_low, ratio_N))
    return LossOutput(
        per_token=-bounded_N * inputs.advantages,
        masked=high_N | low_N,
        metrics={
            "ratio": ratio_N.detach(),
            "clip_low_fraction": _as_share(low_N, inputs),
            "clip_high_fraction": _as_share(high_N, inputs),
        },
    )


def saturated_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log r), without a gradient beyond LOG_RATIO_LIMIT."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _none(inputs: LossInputs) -> torch.Tensor:
    return torch.zeros_like(inputs.logprobs, dtype=torch.bool)


def _as_share(tokens_N: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return tokens_N.to(inputs.logprobs.dtype)
