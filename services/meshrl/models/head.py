"""Logprobs and entropies of given tokens from hidden states, without the logits of a whole row; used by the policy.

The output head, the softmax and the choice of a token are one function of the hidden states. It works on a piece of
the tokens at a time and keeps their log-sum-exp alone; the backward pass makes each piece's logits again:

    log p = z_target - lse,   entropy = lse - sum_v p_v z_v,   z = logits / temperature
    d log p / d z_v = [v is target] - p_v

Exact: nothing is sampled or truncated. Logits are float32, whatever the hidden states are.

Targets may also be several tokens for each place, the predicted one and candidates: logprobs then are as many.

Shapes: N predicted tokens, E hidden size, V vocabulary, P tokens of a piece, J targets of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")


def head_logprobs(
    hidden_NE: torch.Tensor,
    weight_VE: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    *,
    max_logits_bytes: int,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the targets, (N,) or (N, J), and entropies (N,) in nats, float32; entropies carry no gradient.

    `max_logits_bytes` bounds the float32 logits that are there at once; `compiled` fuses the passes over them.
    """
    logprobs_N, entropy_N = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]  # torch's way to call a Function
        hidden_NE, weight_VE, bias_V, targets_N, temperatures_N, max_logits_bytes, compiled
    )
    return logprobs_N, entropy_N


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        weight_VE: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        max_logits_bytes: int,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.piece = max(1, max_logits_bytes // (weight_VE.shape[0] * 4))
        ctx.compiled = compiled
        logprobs_N, entropy_N, lse_N = (
            torch.empty(shape, dtype=torch.float32, device=hidden_NE.device)
            for shape in (targets_N.shape, targets_N.shape[:1], targets_N.shape[:1])
        )
        score = _compiled(_score) if compiled else _score
        for at in _pieces(len(targets_N), ctx.piece):
            logits_PV = _logits(hidden_NE[at], weight_VE, bias_V)
            logprobs_N[at], entropy_N[at], lse_N[at] = score(logits_PV, targets_N[at], temperatures_N[at])
        ctx.save_for_backward(hidden_NE, weight_VE, bias_V, targets_N, temperatures_N, lse_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NE, weight_VE, bias_V, targets_N, temperatures_N, lse_N = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden_NE = torch.empty_like(hidden_NE) if wants_hidden else None
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32) if wants_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        slope = _compiled(_slope) if ctx.compiled else _slope
        for at in _pieces(len(targets_N), ctx.piece):
            logits_PV = _logits(hidden_NE[at], weight_VE, bias_V)
            grad_PV = slope(logits_PV, lse_N[at], targets_N[at], temperatures_N[at], grad_N[at], hidden_NE.dtype)
            if grad_hidden_NE is not None:
                torch.mm(grad_PV, weight_VE, out=grad_hidden_NE[at])
            if grad_weight_VE is not None:
                grad_weight_VE += _product(grad_PV.t(), hidden_NE[at])
            if grad_bias_V is not None:
                grad_bias_V += grad_PV.sum(0, dtype=torch.float32)
        return (
            grad_hidden_NE,
            None if grad_weight_VE is None else grad_weight_VE.to(weight_VE.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
            None,
        )


def _pieces(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _logits(hidden_PE: torch.Tensor, weight_VE: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    logits_PV = _product(hidden_PE, weight_VE.t())
    return logits_PV if bias_V is None else logits_PV + bias_V


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """float32 product; half-precision factors on a GPU are multiplied as they are and summed in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


def _score(
    logits_PV: torch.Tensor, targets_P: torch.Tensor, temperatures_P: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprob, entropy and log-sum-exp of each token of a piece; targets and logprobs may be (P, J)."""
    scaled_PV = logits_PV / temperatures_P[:, None]
    highest_P = scaled_PV.amax(-1)
    weights_PV = (scaled_PV - highest_P[:, None]).exp()
    total_P = weights_PV.sum(-1)
    lse_P = highest_P + total_P.log()
    # A logit of minus infinity has no weight, and must not turn 0 * inf into nan.
    mean_P = torch.where(weights_PV > 0, weights_PV * scaled_PV, 0.0).sum(-1) / total_P
    if targets_P.ndim == 2:
        return scaled_PV.gather(1, targets_P) - lse_P[:, None], lse_P - mean_P, lse_P
    logprobs_P = scaled_PV.gather(1, targets_P[:, None]).squeeze(1) - lse_P
    return logprobs_P, lse_P - mean_P, lse_P


def _slope(
    logits_PV: torch.Tensor,
    lse_P: torch.Tensor,
    targets_P: torch.Tensor,
    temperatures_P: torch.Tensor,
    grad_P: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient of the piece's logits, given that of its logprobs; targets and gradient may be (P, J)."""
    probabilities_PV = (logits_PV / temperatures_P[:, None] - lse_P[:, None]).exp()
    if targets_P.ndim == 2:
        slope_PV = (-grad_P.sum(1, keepdim=True) * probabilities_PV).scatter_add(1, targets_P, grad_P)
        return (slope_PV / temperatures_P[:, None]).to(dtype)
    hit_PV = torch.arange(logits_PV.shape[1], device=logits_PV.device)[None, :] == targets_P[:, None]
    return ((hit_PV.float() - probabilities_PV) * (grad_P / temperatures_P)[:, None]).to(dtype)


def _compiled(function: Callable[Inputs, Result]) -> Callable[Inputs, Result]:
    """torch keeps what it compiled by the function's code, so that this is cheap after the first time."""
    return torch.compile(function, dynamic=True)
