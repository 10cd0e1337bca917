"""Attention over packed rows that never crosses a sample's boundary; used by the trainers' forward pass.

A packed row holds S samples one after another, T tokens in all. Projections and MLPs run on the row as it is, with no
padding. Attention runs sample by sample: on CUDA in half precision through the kernels of `fused_attention`, anywhere
else as causal attention over a few padded blocks of samples of similar length. A T x T mask is never built.
`choose_kernels` is the one place that picks.

Shapes: T tokens of a row, S samples, B samples of a block, L longest of a block, H heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import AttentionInterface, PreTrainedModel

from meshrl.models.fused_attention import FusedPlan, fused_attention

ATTENTION_NAME = "meshrl_packed"
LONG_FROM = 1024  # tokens from which a sample alone fills a Hopper GPU: cuDNN is then twice as fast (RESULTS.md)
BLOCK_GROWTH = 1.5  # a block's longest sample is at most this many times its shortest, so padding stays below a third


AttentionName = Literal["auto", "varlen", "cudnn", "sdpa"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What attention over packed rows runs on. Unfused is `sdpa`: torch's own attention over padded blocks."""

    fused: bool = False
    long_from: int | None = None  # fused: samples of this many tokens or more go through cuDNN; None sends none there


def choose_kernels(wanted: AttentionName, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels for a device and the dtype that attention runs in; "auto" takes the fastest there.

    Raises ValueError for one that cannot run there.
    """
    fits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if wanted == "sdpa" or (wanted == "auto" and not fits):
        return Kernels()
    if not fits:
        raise ValueError(
            f"model.attn {wanted!r} needs a GPU and bfloat16, but the model computes in {dtype} on {device.type}; "
            "use 'auto' or 'sdpa'"
        )
    if wanted == "varlen":
        return Kernels(fused=True)
    if wanted == "cudnn":
        return Kernels(fused=True, long_from=1)
    major, _ = torch.cuda.get_device_capability(device)
    return Kernels(fused=True, long_from=LONG_FROM if major >= 9 else None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Samples of similar length as one padded block."""

    gather: torch.Tensor  # int64 (B, L): token of the row at each place; padding repeats a sample's last token

    @property
    def length(self) -> int:
        return self.gather.shape[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """Where the samples of a row lie, prepared once a row and used by every layer.

    Either `fused` is there, or `blocks` with `scatter`.
    """

    fused: FusedPlan | None
    blocks: tuple[Block, ...]
    scatter: torch.Tensor  # int64 (T,): place of each token in the blocks' outputs laid end to end

    @classmethod
    def from_offsets(
        cls, sample_offsets: NDArray[np.int64], device: torch.device, kernels: Kernels | None = None
    ) -> PackedLayout:
        """Builds the layout of a row from (S + 1,) offsets; unfused unless `kernels` says otherwise."""
        if kernels is not None and kernels.fused:
            plan = FusedPlan.from_offsets(sample_offsets, device, long_from=kernels.long_from)
            return cls(fused=plan, blocks=(), scatter=torch.empty(0, dtype=torch.int64, device=device))
        starts, lengths = sample_offsets[:-1], np.diff(sample_offsets)
        scatter = np.empty(int(sample_offsets[-1]), dtype=np.int64)
        blocks: list[Block] = []
        base = 0
        for members in _similar_lengths(lengths):
            longest = int(lengths[members].max())
            place = np.arange(longest)[None, :]
            gather = starts[members][:, None] + np.minimum(place, lengths[members][:, None] - 1)
            real = place < lengths[members][:, None]
            scatter[gather[real]] = base + np.flatnonzero(real)
            base += gather.size
            blocks.append(Block(gather=torch.from_numpy(gather).to(device)))
        return cls(fused=None, blocks=tuple(blocks), scatter=torch.from_numpy(scatter).to(device))


def _similar_lengths(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Indices of samples grouped so that no block pads a sample beyond BLOCK_GROWTH times its length."""
    order = np.argsort(-lengths, kind="stable")
    groups: list[NDArray[np.int64]] = []
    first = 0
    for index in range(1, len(order) + 1):
        if index == len(order) or lengths[order[index]] * BLOCK_GROWTH < lengths[order[first]]:
            groups.append(order[first:index])
            first = index
    return groups


def supports_packed_attention(model: PreTrainedModel) -> bool:
    """Whether packed attention computes what the model's own attention would.

    False for models with layers other than full or sliding attention, capped scores or attention sinks, and for those
    that do not take an attention function; they run as padded rows of one sample each.
    """
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and layer_types <= {"full_attention", "sliding_attention"}
        and getattr(config, "attn_logit_softcapping", None) is None
        and not has_sinks
    )


def enable_packed_attention(model: PreTrainedModel) -> None:
    """Switches the model's attention to packed rows; each forward then needs `packed_layout=`.

    Adds one entry to transformers' own table of attention functions, which is the way it offers.
    """
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    model.set_attn_implementation(ATTENTION_NAME)


def packed_attention(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample of a row, in the signature transformers calls.

    Returns (1, T, H, D). K key-value heads serve H query heads.
    """
    # Under autocast the norms of some models hand out float32 queries and keys beside half-precision values.
    query_THD, key_TKD, value_TKD = (
        tensor[0].transpose(0, 1).to(value_1KTD.dtype) for tensor in (query_1HTD, key_1KTD, value_1KTD)
    )
    if packed_layout.fused is not None:  # never with dropout: see PackedPolicy
        scale = 1.0 / math.sqrt(query_THD.shape[-1]) if scaling is None else scaling
        out_THD = fused_attention(
            query_THD, key_TKD, value_TKD, packed_layout.fused, scale=scale, window=sliding_window
        )
        return out_THD.unsqueeze(0), None

    out_THD = _attention_by_blocks(query_THD, key_TKD, value_TKD, packed_layout, scaling, dropout, sliding_window)
    return out_THD.unsqueeze(0), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # every row's blocks have other shapes: never compiled
def _attention_by_blocks(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> torch.Tensor:
    outputs = [
        _block_attention(query_THD, key_TKD, value_TKD, block, scaling, dropout, sliding_window)
        for block in layout.blocks
    ]
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat.index_select(0, layout.scatter)


def _block_attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    block: Block,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of one padded block; returns (B * L, H, D). Padding comes after every real query's keys."""
    query_BHLD, key_BKLD, value_BKLD = (
        tensor.index_select(0, block.gather.flatten()).view(*block.gather.shape, *tensor.shape[1:]).transpose(1, 2)
        for tensor in (query_THD, key_TKD, value_TKD)
    )
    groups = query_BHLD.shape[1] // key_BKLD.shape[1]
    if groups > 1:
        key_BKLD = key_BKLD.repeat_interleave(groups, dim=1)
        value_BKLD = value_BKLD.repeat_interleave(groups, dim=1)
    mask_LL = None
    if sliding_window is not None and block.length > sliding_window:
        place = torch.arange(block.length, device=query_BHLD.device)
        distance_LL = place[:, None] - place[None, :]
        mask_LL = (distance_LL >= 0) & (distance_LL < sliding_window)
    out_BHLD = F.scaled_dot_product_attention(
        query_BHLD, key_BKLD, value_BKLD, attn_mask=mask_LL, dropout_p=dropout, is_causal=mask_LL is None, scale=scaling
    )
    return out_BHLD.transpose(1, 2).flatten(0, 1)
