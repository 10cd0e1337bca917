"""Attention over packed rows that never crosses a sample's boundary; used by the trainers' forward pass.

A packed row holds S samples one after another, T tokens in all. Projections and MLPs run on the row as it is, with no
padding. Attention runs sample by sample: on CUDA in half precision through one variable-length kernel, anywhere else
as causal attention over a few padded blocks of samples of similar length. A T x T mask is never built.

Shapes: T tokens of a row, S samples, B samples of a block, L longest of a block, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

ATTENTION_NAME = "meshrl_packed"
BLOCK_GROWTH = 1.5  # a block's longest sample is at most this many times its shortest, so padding stays below a third


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Samples of similar length as one padded block."""

    gather: torch.Tensor  # int64 (B, L): token of the row at each place; padding repeats a sample's last token

    @property
    def length(self) -> int:
        return self.gather.shape[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """Where the samples of a row lie, prepared once a row and used by every layer."""

    offsets: torch.Tensor  # int32 (S + 1,)
    longest: int
    blocks: tuple[Block, ...]
    scatter: torch.Tensor  # int64 (T,): place of each token in the blocks' outputs laid end to end

    @classmethod
    def from_offsets(cls, sample_offsets: NDArray[np.int64], device: torch.device) -> PackedLayout:
        """Builds the layout of a row from (S + 1,) offsets."""
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
        return cls(
            offsets=torch.from_numpy(sample_offsets.astype(np.int32)).to(device),
            longest=int(lengths.max()),
            blocks=tuple(blocks),
            scatter=torch.from_numpy(scatter).to(device),
        )


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
    if value_TKD.is_cuda and value_TKD.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0:
        groups = query_THD.shape[1] // key_TKD.shape[1]  # spelled out, as not every torch takes fewer key heads here
        out_THD = varlen_attn(
            query_THD.contiguous(),
            key_TKD.repeat_interleave(groups, dim=1),
            value_TKD.repeat_interleave(groups, dim=1),
            packed_layout.offsets,
            packed_layout.offsets,
            packed_layout.longest,
            packed_layout.longest,
            scale=scaling,
            window_size=(-1, 0) if sliding_window is None else (sliding_window - 1, 0),
        )
        assert isinstance(out_THD, torch.Tensor)
        return out_THD.unsqueeze(0), None

    outputs = [
        _block_attention(query_THD, key_TKD, value_TKD, block, scaling, dropout, sliding_window)
        for block in packed_layout.blocks
    ]
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat.index_select(0, packed_layout.scatter).unsqueeze(0), None


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
