"""Logprobs of given tokens for packed rows: the trainers' forward pass.

Output head, softmax and the choice of a token are one function, `head_logprobs`, which takes a piece of the tokens at a
time, to bound the float32 logits:

    log p = z_target - lse,   entropy = lse - sum_v p_v z_v,   z = logits / temperature
    d log p / d z_v = [v is target] - p_v

It keeps d log p / d hidden for a head that is not trained, and d log p / d z in the hidden states' dtype where a row's
have room. Otherwise it keeps the log-sum-exp alone, and the backward pass makes logits again.

Shapes: T tokens of a row, N predicted tokens (those that a loss looks at), V vocabulary, E hidden size,
K candidates of a token, P tokens of a piece, J targets of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from meshrl.models.attention import (
    ATTENTION_NAME,
    AttentionName,
    Kernels,
    PackedLayout,
    choose_kernels,
    packed_attention,
    use_attention,
)
from meshrl.models.families import (
    UNTRAINABLE_TYPES,
    needs_unfused,
    positions_grow_beyond,
    prefix_reason,
    unpacked_reason,
)
from meshrl.models.routers import Routers
from meshrl.models.sharded import local
from meshrl.models.shares import ContextShare, TensorShare, sum_over_ranks

# Models that change the logits after the output head name it with one of these; for them the head is not taken apart.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
LOGITS_GPU, LOGITS_CPU = 2**31, 2**28  # bytes of the float32 logits that are there at once, unless settings differ
MOST_PIECE_BYTES = 2**31  # of float32 logits; larger pieces are no faster
PIECE_STEP = 8  # tokens of a piece are a multiple of it: triton compiles a kernel again for addresses unlike 16 n bytes
KEPT_SHARE = 0.8  # of the bytes for logits, the most that gradients of logits may take until the backward pass


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRow:
    token_ids: torch.Tensor  # int64 (T,)
    position_ids: torch.Tensor  # int64 (T,), restart with each sample at the length of its shared prefix
    layout: PackedLayout
    predicted: torch.Tensor  # int64 (N,) index of each predicted token in the row
    sources: torch.Tensor  # int64 (N,) index of the token that predicts it: the one before it, or its prefix's last
    temperatures: torch.Tensor  # float32 (N,), above 0
    candidates: torch.Tensor | None = None  # int64 (N, K) other tokens whose logprobs in its place are wanted
    routes: torch.Tensor | None = None  # int16 (T, L, K) experts that routers are to choose, see `models.routers`


class PackedPolicy(nn.Module):
    """A causal LM as a function from packed rows, laid out for `kernels`, to token logprobs.

    One whose attention cannot be replaced runs on padded rows of one sample each, with the same numbers.
    `prefix_reason` is why samples of a row cannot share their beginning, None if they can.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute_dtype: torch.dtype = torch.float32,
        max_logits_bytes: int = LOGITS_CPU,
        attn: AttentionName = "auto",
        device: torch.device | None = None,
        autocast: bool = True,
        compile_head: bool = False,
        one_pass: bool = False,
        context: ContextShare | None = None,
        tensor: TensorShare | None = None,
        wide_routers: bool = False,
    ) -> None:
        """`autocast` is off if the parameters themselves come in compute_dtype; `device` for a model on meta.

        `max_logits_bytes` bounds the float32 logits at once. `one_pass`: a row takes one forward pass, since other
        ranks wait in it; padded rows are then as long as the longest sample. `context`: the ranks that share a row.
        `tensor`: those that share its products. Raises ValueError for a model that cannot be trained and for an
        attention that cannot run here.
        """
        super().__init__()
        if (reason := UNTRAINABLE_TYPES.get(model.config.get_text_config().model_type)) is not None:
            raise ValueError(
                f"a model of type {model.config.model_type!r} cannot be trained: {reason}; take another one"
            )
        self.model = model
        self.routers = Routers(model, wide=wide_routers)
        self.unpacked_reason = unpacked_reason(model)
        self.packed = self.unpacked_reason is None
        self._fixed_positions = positions_grow_beyond(model.config.get_text_config())
        self._one_pass = one_pass
        device = device or model.device
        dtype = model.dtype if compute_dtype is torch.float32 else compute_dtype
        self.kernels = Kernels(one_block=one_pass)
        if self.packed:
            use_attention(model, ATTENTION_NAME, packed_attention)
            dropout = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
            kernels = choose_kernels("sdpa" if dropout or needs_unfused(model) else attn, device, dtype)
            self.kernels = replace(kernels, context=context)
        self.prefix_reason = self.unpacked_reason or prefix_reason(model)
        if self.prefix_reason is None and not self.kernels.fused and device.type != "cpu":
            self.prefix_reason = "its attention kernels here take none"
        self._compute_dtype = compute_dtype
        self._autocast = autocast and compute_dtype is not torch.float32
        self._max_logits_bytes = max_logits_bytes
        self._compile_head = compile_head
        self._tensor = tensor

    def forward(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs (N,), or (N, 1 + K) with candidates, and entropies (N,) of the predicted tokens, float32; entropies
        carry no gradient."""
        if self._must_split(row):
            parts = [self(sample) for sample in _samples(row)]
            return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])
        targets_N = row.token_ids[row.predicted]
        if row.candidates is not None:
            targets_N = torch.cat([targets_N[:, None], row.candidates], dim=1)
        share = row.layout.kernels.context
        if share is None:
            return self._logprobs(row, row.sources, targets_N, row.temperatures)
        own = share.own(len(row.token_ids))
        here_M = ((row.sources >= own.start) & (row.sources < own.stop)).nonzero()[:, 0]
        part = replace(
            row,
            token_ids=row.token_ids[own],
            position_ids=row.position_ids[own],
            routes=None if row.routes is None else row.routes[own],
        )
        logprobs_M, entropies_M = self._logprobs(
            part, row.sources[here_M] - own.start, targets_N[here_M], row.temperatures[here_M]
        )
        logprobs_N, entropies_N = (share.whole(each_M, here_M, len(targets_N)) for each_M in (logprobs_M, entropies_M))
        return logprobs_N, entropies_N

    def _logprobs(
        self, row: PackedRow, sources_N: torch.Tensor, targets_N: torch.Tensor, temperatures_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(row.token_ids.device.type, self._compute_dtype, enabled=self._autocast):
            if not self.packed:
                return token_logprobs(self._padded_logits(row, sources_N), targets_N, temperatures_N)
            inputs = {
                "input_ids": row.token_ids[None],
                "position_ids": row.position_ids[None],
                "use_cache": False,
                "packed_layout": row.layout,
            }
            if transforms_logits(self.model):
                with self.routers.replaying(row.routes):
                    logits_1NV = self.model(**inputs, logits_to_keep=sources_N).logits
                return token_logprobs(logits_1NV[0], targets_N, temperatures_N)
            with self.routers.replaying(row.routes):
                hidden_1TE = self.model.base_model(**inputs).last_hidden_state
            return self._head(hidden_1TE[0, sources_N], targets_N, temperatures_N)

    def _must_split(self, row: PackedRow) -> bool:
        """Whether rotary embeddings, which follow the longest sequence of a pass, would be wrong for other samples."""
        limit, lengths = self._fixed_positions, row.layout.lengths
        if limit is None or max(lengths) <= limit or len(lengths) == 1:
            return False
        if self._one_pass:
            raise ValueError(
                f"a row has several samples, one of {max(lengths)} tokens, but the rotary embeddings of "
                f"{type(self.model).__name__} change for all of them beyond {limit}; lower seq_len to {limit}, or "
                "train on one GPU, where such rows are computed sample by sample"
            )
        return True

    def _head(
        self, hidden_NE: torch.Tensor, targets_N: torch.Tensor, temperatures_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = self.model.get_output_embeddings()
        if type(head) is nn.Linear:
            dtype = self._compute_dtype if self._autocast else head.weight.dtype
            with torch.autocast(hidden_NE.device.type, enabled=False):  # the head looks after its own precision
                return head_logprobs(
                    hidden_NE.to(dtype),
                    local(head.weight).to(dtype),
                    None if head.bias is None else local(head.bias),
                    targets_N,
                    temperatures_N,
                    max_logits_bytes=self._max_logits_bytes,
                    compiled=self._compile_head,
                    share=self._tensor if isinstance(head.weight, DTensor) else None,
                    slopes=hidden_NE.is_cuda,
                )
        piece = max(1, self._max_logits_bytes // (int(self.model.config.get_text_config().vocab_size) * 4))
        parts = [
            checkpoint(
                lambda *inputs: token_logprobs(head(inputs[0]), inputs[1], inputs[2]),
                hidden_NE[start : start + piece],
                targets_N[start : start + piece],
                temperatures_N[start : start + piece],
                use_reentrant=False,
            )
            for start in range(0, max(1, len(targets_N)), piece)
        ]
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])

    def _padded_logits(self, row: PackedRow, sources_N: torch.Tensor) -> torch.Tensor:
        """(N, V), by one padded row per sample; right padding needs no mask."""
        place_N = row.layout.scatter[sources_N]
        logits_NV: torch.Tensor | None = None
        base = 0
        for gather_BL in row.layout.blocks:
            routes = None if row.routes is None else row.routes[gather_BL].flatten(0, 1)
            with self.routers.replaying(routes):
                logits_BLV: torch.Tensor = self.model(input_ids=row.token_ids[gather_BL], use_cache=False).logits
            flat_PV = logits_BLV.flatten(0, 1)
            here_N = (place_N >= base) & (place_N < base + len(flat_PV))
            if logits_NV is None:
                logits_NV = flat_PV.new_zeros((len(place_N), flat_PV.shape[-1]))
            logits_NV = logits_NV.index_put((here_N.nonzero()[:, 0],), flat_PV[place_N[here_N] - base])
            base += len(flat_PV)
        assert logits_NV is not None, "a row has a sample"
        return logits_NV


def transforms_logits(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    return any(getattr(config, name, None) not in (None, 1, 1.0) for name in LOGIT_TRANSFORMS)


def _samples(row: PackedRow) -> Iterator[PackedRow]:
    start = 0
    for length in row.layout.lengths:
        end = start + length
        here_N = (row.predicted >= start) & (row.predicted < end)
        yield PackedRow(
            token_ids=row.token_ids[start:end],
            position_ids=row.position_ids[start:end],
            layout=row.layout.of_one(length),
            predicted=row.predicted[here_N] - start,
            sources=row.sources[here_N] - start,
            temperatures=row.temperatures[here_N],
            candidates=None if row.candidates is None else row.candidates[here_N],
            routes=None if row.routes is None else row.routes[start:end],
        )
        start = end


def token_logprobs(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, temperatures_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of targets, one or several a token, under softmax(logits / temperature), and its entropy, in nats."""
    logprobs_NV = torch.log_softmax(logits_NV.float() / temperatures_N[:, None], dim=-1)
    logprobs_N = logprobs_NV.gather(1, targets_N.reshape(len(logprobs_NV), -1)).reshape(targets_N.shape)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_N, entropy_N


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
    share: TensorShare | None = None,
    slopes: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the targets, (N,) or (N, J), and entropies (N,) in nats, float32; entropies carry no gradient.

    `max_logits_bytes` bounds the logits at once, and with `slopes` also those kept for the backward pass; `compiled`
    fuses the passes over them. With a `share`, weight and bias are this rank's rows of the vocabulary.
    """
    slopes = slopes and torch.is_grad_enabled() and targets_N.ndim == 1 and share is None
    logprobs_N, entropy_N = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]  # torch's way to call a Function
        hidden_NE, weight_VE, bias_V, targets_N, temperatures_N, max_logits_bytes, compiled, share, slopes
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
        share: TensorShare | None,
        slopes: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        trains = any(ctx.needs_input_grad[1:3])  # the head itself
        kept_bytes = len(targets_N) * weight_VE.shape[0] * hidden_NE.itemsize if trains else 0
        slopes = slopes and kept_bytes <= KEPT_SHARE * max_logits_bytes
        piece_bytes = min(max_logits_bytes - kept_bytes * slopes, MOST_PIECE_BYTES)
        ctx.piece = max(1, piece_bytes // (weight_VE.shape[0] * 4))
        ctx.compiled, ctx.share = compiled, share
        if share is not None:
            targets_N = targets_N - share.rank * weight_VE.shape[0]
        logprobs_N, entropy_N, lse_N = (
            torch.empty(shape, dtype=torch.float32, device=hidden_NE.device)
            for shape in (targets_N.shape, targets_N.shape[:1], targets_N.shape[:1])
        )
        slope_NV = hidden_NE.new_empty(len(targets_N), weight_VE.shape[0]) if slopes and trains else None
        toward_NE = torch.empty_like(hidden_NE) if slopes and not trains else None
        fused = compiled and hidden_NE.is_cuda and targets_N.ndim == 1
        if fused and ctx.piece > PIECE_STEP:
            ctx.piece -= ctx.piece % PIECE_STEP
        for at in _pieces(len(targets_N), ctx.piece):
            logits_PV = _logits(hidden_NE[at], weight_VE, bias_V)
            slope_PV = None if slope_NV is None else slope_NV[at]
            if toward_NE is not None:
                slope_PV = hidden_NE.new_empty(logits_PV.shape)
            of_tokens = (targets_N[at], temperatures_N[at])
            if fused:
                from meshrl.models.kernels import fused_head  # needs a GPU

                into = (logprobs_N[at], entropy_N[at], lse_N[at])
                fused_head.score(logits_PV, *of_tokens, into, slope_PV)
            else:
                score = _compiled(_score) if compiled else _score
                logprobs_N[at], entropy_N[at], lse_N[at] = score(logits_PV, *of_tokens)
                if slope_PV is not None:
                    ones_P = torch.ones_like(lse_N[at])
                    slope_PV.copy_(_slope(logits_PV, lse_N[at], *of_tokens, ones_P, slope_PV.dtype))
            if toward_NE is not None and slope_PV is not None:
                torch.mm(slope_PV, weight_VE, out=toward_NE[at])
        if share is not None and len(targets_N):
            inside_N = (targets_N >= 0) & (targets_N < weight_VE.shape[0])
            logprobs_N, entropy_N, lse_N = _of_whole_vocabulary(logprobs_N, entropy_N, lse_N, inside_N, share)
        if toward_NE is not None:
            ctx.save_for_backward(toward_NE)
        else:
            ctx.save_for_backward(hidden_NE, weight_VE, bias_V, targets_N, temperatures_N, lse_N, slope_NV)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if len(ctx.saved_tensors) == 1:
            (toward_NE,) = ctx.saved_tensors
            return (toward_NE * grad_N[:, None]).to(toward_NE.dtype), *[None] * 8
        hidden_NE, weight_VE, bias_V, targets_N, temperatures_N, lse_N, slope_NV = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if slope_NV is not None:
            slope_VN, grad_N1 = slope_NV.t(), grad_N[:, None]
            scaled_NE = (hidden_NE * grad_N1).to(hidden_NE.dtype)
            return (
                ((slope_NV @ weight_VE) * grad_N1).to(hidden_NE.dtype) if wants_hidden else None,
                (slope_VN @ scaled_NE).to(weight_VE.dtype) if wants_weight else None,
                (slope_VN @ grad_N.to(slope_NV.dtype)).to(bias_V.dtype) if wants_bias else None,
                *[None] * 6,
            )
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
                _add_product(grad_weight_VE, grad_PV.t(), hidden_NE[at])
            if grad_bias_V is not None:
                grad_bias_V += grad_PV.sum(0, dtype=torch.float32)
        if ctx.share is not None and grad_hidden_NE is not None and len(targets_N):
            grad_hidden_NE = sum_over_ranks(grad_hidden_NE, ctx.share.group)
        return (
            grad_hidden_NE,
            None if grad_weight_VE is None else grad_weight_VE.to(weight_VE.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            *[None] * 6,
        )


def _pieces(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _logits(hidden_PE: torch.Tensor, weight_VE: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    logits_PV = _product(hidden_PE, weight_VE.t())
    return logits_PV if bias_V is None else logits_PV + bias_V


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """float32; half-precision factors on a GPU are multiplied as they are and summed in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += _product(left, right)


def _score(
    logits_PV: torch.Tensor, targets_P: torch.Tensor, temperatures_P: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprob, entropy and log-sum-exp; targets and logprobs may be (P, J)."""
    targets_P = targets_P.clamp(0, logits_PV.shape[1] - 1)
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


def _of_whole_vocabulary(
    logprobs_N: torch.Tensor, entropy_N: torch.Tensor, lse_N: torch.Tensor, inside_N: torch.Tensor, share: TensorShare
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_each = (-1, *[1] * (logprobs_N.ndim - 1))
    chosen_NJ = torch.where(inside_N, logprobs_N + lse_N.view(of_each), 0.0).view(len(lse_N), -1)
    parts_RN3 = share.stacked(torch.cat([lse_N[:, None], (lse_N - entropy_N)[:, None], chosen_NJ], dim=1))
    lse_RN, mean_RN = parts_RN3[..., 0], parts_RN3[..., 1]
    lse_N = lse_RN.logsumexp(0)
    mean_N = ((lse_RN - lse_N).exp() * mean_RN).sum(0)
    chosen_N = parts_RN3[..., 2:].sum(0).view(logprobs_N.shape)
    return chosen_N - lse_N.view(of_each), lse_N - mean_N, lse_N


def _slope(
    logits_PV: torch.Tensor,
    lse_P: torch.Tensor,
    targets_P: torch.Tensor,
    temperatures_P: torch.Tensor,
    grad_P: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient of the logits; targets and the given one may be (P, J)."""
    probabilities_PV = (logits_PV / temperatures_P[:, None] - lse_P[:, None]).exp()
    if targets_P.ndim == 2:
        inside_P = (targets_P >= 0) & (targets_P < logits_PV.shape[1])
        hits_P, place_P = torch.where(inside_P, grad_P, 0.0), targets_P.clamp(0, logits_PV.shape[1] - 1)
        slope_PV = (-grad_P.sum(1, keepdim=True) * probabilities_PV).scatter_add(1, place_P, hits_P)
        return (slope_PV / temperatures_P[:, None]).to(dtype)
    hit_PV = torch.arange(logits_PV.shape[1], device=logits_PV.device)[None, :] == targets_P[:, None]
    return ((hit_PV.float() - probabilities_PV) * (grad_P / temperatures_P)[:, None]).to(dtype)


def _compiled(function: Callable[Inputs, Result]) -> Callable[Inputs, Result]:
    return torch.compile(function, dynamic=True)
