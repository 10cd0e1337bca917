"""Attention over packed rows whose samples share their beginnings, such as the prompt of a group.

A row holds a shared beginning once, in the first of its samples. A token of another sample sees two sets of keys: its
own sample's up to itself, and the whole prefix. Each set is an attention of its own, causal and not; outputs are put
together by their log-sum-exps (l), as FlashAttention does with blocks of keys:

    l = log(exp(l_own) + exp(l_prefix)),   out = exp(l_own - l) out_own + exp(l_prefix - l) out_prefix

A backward kernel computes p = exp(score - l) from the l that it is given. Given the common one and the common output,
each set's kernel gives its part of the gradients, and the parts add up.

On a GPU, where no sample of a row is long, one kernel does both sets: each sample's keys are a copy of its prefix and
its own, and causality counts from their ends.

Shapes: T tokens of a row, S samples, H query heads, K key-value heads, D head size. A block has B samples and L tokens,
a span N queries and P tokens of the prefix. J keys are those of all samples, each after its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.models.kernels.fused_attention import (
    OPERATOR,
    FusedPlan,
    attention_backward,
    attention_forward,
    gradient_shapes,
    output_shapes,
    upload,
)

_aten = torch.ops.aten


class Span(NamedTuple):
    """Neighbouring samples that share the same prefix."""

    queries: slice  # the samples' own tokens in the row
    keys: slice  # the prefix


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixPlan:
    """Which tokens of a row see which prefix besides their own sample."""

    bounds: torch.Tensor  # int64 (4 * spans,) on the CPU: first and end of a span's queries, then of its keys
    query_index: torch.Tensor  # int64 on the device: the spans' queries, end to end
    query_offsets: torch.Tensor  # int32 on the device, (spans + 1,)
    key_index: torch.Tensor  # int64: the spans' prefixes
    key_offsets: torch.Tensor  # int32, (spans + 1,)
    host: torch.Tensor  # int64 on the CPU: most queries and most keys of a span, most keys of a sample with its prefix
    whole_index: torch.Tensor  # int64 (J,) on the device: each sample's prefix and own tokens
    whole_offsets: torch.Tensor  # int32 on the device, (S + 1,)
    own_place: torch.Tensor  # int64 (T,) on the device: where of those each token is of its own sample
    prefix_place: torch.Tensor  # int64 on the device: where of those a token is of a prefix

    @property
    def spans(self) -> list[Span]:
        """Span by span, for kernels that take them one at a time."""
        bounds = self.bounds.view(-1, 4).tolist()
        return [Span(slice(first, end), slice(first_key, end_key)) for first, end, first_key, end_key in bounds]

    @classmethod
    def from_samples(
        cls,
        sample_offsets: NDArray[np.int64],
        prefix_tokens: NDArray[np.int32] | None,
        prefix_samples: NDArray[np.int32] | None,
        device: torch.device,
    ) -> PrefixPlan | None:
        """Of a row as a MicroBatch describes it. None without a prefix."""
        if prefix_tokens is None or prefix_samples is None or not prefix_tokens.any():
            return None
        offsets, spans = sample_offsets.tolist(), list[Span]()
        for sample in np.flatnonzero(prefix_tokens).tolist():
            first = offsets[int(prefix_samples[sample])]
            keys = slice(first, first + int(prefix_tokens[sample]))
            start, end = offsets[sample], offsets[sample + 1]
            if spans and spans[-1].keys == keys and spans[-1].queries.stop == start:
                start = spans.pop().queries.start
            spans.append(Span(slice(start, end), keys))
        queries, keys_of = [span.queries for span in spans], [span.keys for span in spans]
        lengths = np.diff(sample_offsets)
        wholes = lengths + prefix_tokens
        own = np.repeat(np.cumsum(wholes) - lengths - sample_offsets[:-1], lengths) + np.arange(offsets[-1])
        is_prefix = np.ones(int(wholes.sum()), dtype=np.bool_)
        is_prefix[own] = False
        whole = np.empty(len(is_prefix), dtype=np.int64)
        whole[own] = np.arange(offsets[-1])
        firsts = sample_offsets[prefix_samples]
        whole[is_prefix] = _indices([slice(at, at + n) for at, n in zip(firsts, prefix_tokens, strict=True)])
        return cls(
            bounds=torch.tensor([at for span in spans for part in span for at in (part.start, part.stop)]),
            query_index=upload(_indices(queries), device),
            query_offsets=upload(_offsets(queries), device),
            key_index=upload(_indices(keys_of), device),
            key_offsets=upload(_offsets(keys_of), device),
            host=torch.tensor([*(max(at.stop - at.start for at in part) for part in (queries, keys_of)), wholes.max()]),
            whole_index=upload(whole, device),
            whole_offsets=upload(np.concatenate([[0], np.cumsum(wholes)]).astype(np.int32), device),
            own_place=upload(own, device),
            prefix_place=upload(np.flatnonzero(is_prefix), device),
        )


def _indices(parts: Sequence[slice]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(at.start, at.stop, dtype=np.int64) for at in parts])


def _offsets(parts: Sequence[slice]) -> NDArray[np.int32]:
    ends = np.cumsum([at.stop - at.start for at in parts])
    return np.concatenate([[0], ends]).astype(np.int32)


def merge(
    out_THD: torch.Tensor, lse_TH: torch.Tensor, other_THD: torch.Tensor, other_TH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of attention to two sets of keys together."""
    both_TH = torch.logaddexp(lse_TH, other_TH)
    merged_THD = out_THD * (lse_TH - both_TH).exp()[..., None] + other_THD * (other_TH - both_TH).exp()[..., None]
    return merged_THD.to(out_THD.dtype), both_TH


# --- the CPU: padded blocks of samples, then span by span ---------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]  # every row's blocks have other shapes: never compiled
def cpu_prefix_attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    scatter: torch.Tensor,
    prefixes: PrefixPlan,
    scale: float,
) -> torch.Tensor:
    """Causal attention within each sample and to its prefix, (T, H, D); `blocks` and `scatter` as in a PackedLayout."""
    out_THD: torch.Tensor = _CpuAttention.apply(  # type: ignore[no-untyped-call]  # torch's way to call a Function
        query_THD, key_TKD, value_TKD, blocks, scatter, prefixes.spans, scale
    )
    return out_THD


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        blocks: Sequence[torch.Tensor],
        scatter: torch.Tensor,
        spans: Sequence[Span],
        scale: float,
    ) -> torch.Tensor:
        outs, lses = [], []
        for gather in blocks:
            parts = [in_block(tensor, gather) for tensor in (query_THD, key_TKD, value_TKD)]
            out_BHLD, lse_BHL = _cpu_forward(*parts, causal=True, scale=scale)
            outs.append(out_BHLD.transpose(1, 2).flatten(0, 1))
            lses.append(lse_BHL.transpose(1, 2).flatten(0, 1))
        out_THD, lse_TH = (torch.cat(parts).index_select(0, scatter) for parts in (outs, lses))
        for span in spans:
            own = (query_THD[span.queries], key_TKD[span.keys], value_TKD[span.keys])
            out, lse = _cpu_forward(*map(_one, own), causal=False, scale=scale)
            out_NHD, lse_NH = out[0].transpose(0, 1), lse[0].transpose(0, 1)
            at = span.queries
            out_THD[at], lse_TH[at] = merge(out_THD[at], lse_TH[at], out_NHD, lse_NH)
        ctx.save_for_backward(query_THD, key_TKD, value_TKD, out_THD, lse_TH)
        ctx.blocks, ctx.scatter, ctx.spans, ctx.scale = blocks, scatter, spans, scale
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_THD, key_TKD, value_TKD, out_THD, lse_TH = ctx.saved_tensors
        places = sum(gather.numel() for gather in ctx.blocks)
        grad_PHD = grad_THD.new_zeros(places, *grad_THD.shape[1:]).index_copy_(0, ctx.scatter, grad_THD)  # 0 at padding
        pieces: list[list[torch.Tensor]] = [[], [], []]
        base = 0
        for gather in ctx.blocks:
            size = gather.numel()
            grad_BLHD = grad_PHD[base : base + size].view(*gather.shape, *grad_PHD.shape[1:])
            parts = [in_block(tensor, gather) for tensor in (query_THD, key_TKD, value_TKD, out_THD)]
            lse_BHL = lse_TH.index_select(0, gather.flatten()).view(*gather.shape, -1).transpose(1, 2)
            found = _cpu_backward(grad_BLHD.transpose(1, 2), parts, lse_BHL, causal=True, scale=ctx.scale)
            for kept, part in zip(pieces, found, strict=True):
                kept.append(part.transpose(1, 2).flatten(0, 1))
            base += size
        gradients = [torch.cat(kept).index_select(0, ctx.scatter) for kept in pieces]
        for span in ctx.spans:
            parts = [query_THD[span.queries], key_TKD[span.keys], value_TKD[span.keys], out_THD[span.queries]]
            lse_1HN = lse_TH[span.queries].transpose(0, 1)[None]
            grad_1HND = _one(grad_THD[span.queries])
            found = _cpu_backward(grad_1HND, list(map(_one, parts)), lse_1HN, causal=False, scale=ctx.scale)
            for gradient, part, at in zip(gradients, found, (span.queries, span.keys, span.keys), strict=True):
                gradient[at] += part[0].transpose(0, 1)
        return (*gradients, None, None, None, None)


def _one(tensor_NHD: torch.Tensor) -> torch.Tensor:
    return tensor_NHD.transpose(0, 1)[None]


def in_block(tensor_THD: torch.Tensor, gather_BL: torch.Tensor) -> torch.Tensor:
    """(B, H, L, D) of the block's tokens."""
    return tensor_THD.index_select(0, gather_BL.flatten()).view(*gather_BL.shape, *tensor_THD.shape[1:]).transpose(1, 2)


def _cpu_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, H, L, D) and log-sum-exp (B, H, L) of queries to keys whose K heads are shared by H."""
    groups = query.shape[1] // key.shape[1]
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, repeated(key, groups), repeated(value, groups), 0.0, causal, scale=scale
    )
    return out, lse


def _cpu_backward(
    grad: torch.Tensor, parts: Sequence[torch.Tensor], lse: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`parts`: queries, keys, values and the output."""
    query, key, value, out = parts
    groups, heads = query.shape[1] // key.shape[1], key.shape[1]
    to_query, to_key, to_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, repeated(key, groups), repeated(value, groups), out, lse, 0.0, causal, scale=scale
    )
    if groups > 1:
        to_key, to_value = (tensor.unflatten(1, (heads, groups)).sum(2) for tensor in (to_key, to_value))
    return to_query, to_key, to_value


def repeated(tensor_BKLD: torch.Tensor, groups: int) -> torch.Tensor:
    return tensor_BKLD if groups == 1 else tensor_BKLD.repeat_interleave(groups, dim=1)


# --- a GPU: one variable-length kernel, or the packed row's own operator and then one for all spans ---------------


def fused_prefix_attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    plan: FusedPlan,
    prefixes: PrefixPlan,
    *,
    scale: float,
) -> torch.Tensor:
    """Causal attention within each sample and to its prefix, (T, H, D), in half precision."""
    out_THD, _ = _fused(
        query_THD.contiguous(),
        key_TKD.contiguous(),
        value_TKD.contiguous(),
        [plan.offsets, plan.short_index, plan.short_offsets, plan.host],
        [
            prefixes.query_index, prefixes.query_offsets, prefixes.key_index, prefixes.key_offsets, prefixes.host,
            prefixes.whole_index, prefixes.whole_offsets, prefixes.own_place, prefixes.prefix_place,
        ],
        scale,
    )  # fmt: skip
    return out_THD  # type: ignore[no-any-return]  # a custom operator is untyped


PREFIX_OPERATOR = f"{OPERATOR}_with_prefixes"


@torch.library.custom_op(PREFIX_OPERATOR, mutates_args=())
def _fused(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    plan: list[torch.Tensor],
    prefixes: list[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    query_index, query_offsets, key_index, key_offsets, host, whole_index, whole_offsets, *_ = prefixes
    most_queries, most_keys, longest_whole = host.tolist()
    if (longest := _longest_of_short(plan)) is not None:
        out_THD, lse_HT, *_ = _aten._flash_attention_forward(
            query_THD, key_TKD.index_select(0, whole_index), value_TKD.index_select(0, whole_index),
            plan[0], whole_offsets, longest, longest_whole, 0.0, True, False, scale=scale,
        )  # fmt: skip
        return out_THD, lse_HT
    out_THD, lse_HT = attention_forward(query_THD, key_TKD, value_TKD, plan, scale)
    out_NHD, lse_HN, *_ = _aten._flash_attention_forward(
        query_THD.index_select(0, query_index), key_TKD.index_select(0, key_index),
        value_TKD.index_select(0, key_index), query_offsets, key_offsets, most_queries, most_keys,
        0.0, False, False, scale=scale,
    )  # fmt: skip
    merged_NHD, both_NH = merge(
        out_THD.index_select(0, query_index), lse_HT.index_select(1, query_index).t(), out_NHD, lse_HN.t()
    )
    out_THD.index_copy_(0, query_index, merged_NHD)
    lse_HT.index_copy_(1, query_index, both_NH.t())
    return out_THD, lse_HT


def _longest_of_short(plan: Sequence[torch.Tensor]) -> int | None:
    """Tokens of the longest sample of a FusedPlan, if none is long."""
    longest, _, *spans = plan[-1].tolist()
    return None if spans else longest


_fused.register_fake(output_shapes)


@torch.library.custom_op(f"{PREFIX_OPERATOR}_backward", mutates_args=())
def _fused_backward(
    grad_THD: torch.Tensor,
    inputs: list[torch.Tensor],
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    plan: list[torch.Tensor],
    prefixes: list[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query_index, query_offsets, key_index, key_offsets, host, whole_index, whole_offsets, own, prefix = prefixes
    most_queries, most_keys, longest_whole = host.tolist()
    nothing = torch.zeros(2, dtype=torch.uint64, device=grad_THD.device)
    if (longest := _longest_of_short(plan)) is not None:
        query_THD, *keyed = inputs
        to_query, *parts = _aten._flash_attention_backward(
            grad_THD, query_THD, *(tensor.index_select(0, whole_index) for tensor in keyed), out_THD, lse_HT,
            plan[0], whole_offsets, longest, longest_whole, 0.0, True, nothing, nothing, scale=scale,
        )  # fmt: skip
        to_key, to_value = (part.index_select(0, own) for part in parts)
        shared = whole_index.index_select(0, prefix)  # places repeat, one for each sample after a prefix
        for gradient, part in zip((to_key, to_value), parts, strict=True):
            gradient.index_add_(0, shared, part.index_select(0, prefix))
        return to_query, to_key, to_value
    to_query, to_key, to_value = attention_backward(grad_THD, inputs, out_THD, lse_HT, plan, scale)
    grad_NHD, query_NHD, out_NHD = (tensor.index_select(0, query_index) for tensor in (grad_THD, inputs[0], out_THD))
    key_PKD, value_PKD = (tensor.index_select(0, key_index) for tensor in inputs[1:])
    query_part, key_part, value_part = _aten._flash_attention_backward(
        grad_NHD, query_NHD, key_PKD, value_PKD, out_NHD, lse_HT.index_select(1, query_index).contiguous(),
        query_offsets, key_offsets, most_queries, most_keys, 0.0, False, nothing, nothing, scale=scale,
    )  # fmt: skip
    to_query.index_add_(0, query_index, query_part)
    to_key.index_add_(0, key_index, key_part)  # spans may share a prefix, so places may repeat
    to_value.index_add_(0, key_index, value_part)
    return to_query, to_key, to_value


_fused_backward.register_fake(gradient_shapes)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query_THD, key_TKD, value_TKD, plan, prefixes, ctx.scale = inputs
    ctx.parts = len(plan)
    ctx.save_for_backward(query_THD, key_TKD, value_TKD, *plan, *prefixes, *output)


def _backward(ctx: Any, grad_THD: torch.Tensor, _: object) -> tuple[object, ...]:
    query, key, value, *lists, out, lse = ctx.saved_tensors
    plan, prefixes = lists[: ctx.parts], lists[ctx.parts :]
    gradients = _fused_backward(grad_THD.contiguous(), [query, key, value], out, lse, plan, prefixes, ctx.scale)
    return (*gradients, [None] * len(plan), [None] * len(prefixes), None)


_fused.register_autograd(_backward, setup_context=_keep_for_backward)
