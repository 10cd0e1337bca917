"""Attention over packed rows that never crosses a sample's boundary.

A packed row holds samples one after another, without padding. Attention runs sample by sample: on CUDA in half
precision by the kernels of `fused_attention`, elsewhere over a few padded blocks of samples of similar length.

Shapes: T tokens of a row, S samples, B samples of a block, L longest of a block, H heads, D head size. In ScoreRule Q
query heads share H key-value heads, and L queries see S keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import AttentionInterface, PreTrainedModel

from meshrl.models.kernels.fused_attention import FusedPlan, fused_attention, upload
from meshrl.models.shared_prefix import (
    PrefixPlan,
    cpu_prefix_attention,
    fused_prefix_attention,
    in_block,
    repeated,
)
from meshrl.models.shares import ContextShare

ATTENTION_NAME = "meshrl_packed"
LONG_FROM = 1024  # tokens from which a sample alone fills a Hopper GPU: cuDNN is then twice as fast
BLOCK_GROWTH = 1.5  # a block's longest sample is at most this many times its shortest, so padding stays below a third


AttentionName = Literal["auto", "varlen", "cudnn", "sdpa"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """How rows are attended to. Unfused is `sdpa`: torch's own attention over padded blocks.

    `one_block` pads all samples of a row to the longest: for models on padded rows, where all ranks must make as many
    forward passes. `context`: the ranks that share a row; None if each has its own.
    """

    fused: bool = False
    long_from: int | None = None  # fused: samples of this many tokens or more go through cuDNN; None sends none there
    one_block: bool = False
    context: ContextShare | None = None


def choose_kernels(wanted: AttentionName, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels for a device and attention's dtype; "auto" takes the fastest. Raises ValueError for kernels that
    cannot run there."""
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
class ScoreRule:
    """How a layer turns its scores into weights, as its model does; in training and in the engine's slots."""

    scale: float | None = None  # of the scores; None is 1 / sqrt(head size)
    window: int | None = None  # how many tokens back a query sees, itself counted; None is all of them
    softcap: float | None = None  # scores are bounded as softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118)
    sinks: torch.Tensor | None = None  # (Q,) of each head, a score without a value (gpt-oss, arXiv 2508.10925)
    dropout: float = 0.0  # of the weights

    @property
    def plain(self) -> bool:
        """Whether a fused kernel can do it."""
        return self.softcap is None and self.sinks is None

    def attend(
        self,
        query_BQLD: torch.Tensor,
        key_BHSD: torch.Tensor,
        value_BHSD: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        causal: bool,
    ) -> torch.Tensor:
        """Attention (B, Q, L, D) of L queries to S keys, whose H heads are shared by Q query heads.

        `mask` is true, or 0 of an additive one, where a query sees a key, the window included. `causal` needs as many
        queries as keys. Rules that are not `plain` hold all scores at once.
        """
        if self.plain:
            return F.scaled_dot_product_attention(
                query_BQLD, key_BHSD, value_BHSD, attn_mask=mask, dropout_p=self.dropout, is_causal=causal,
                scale=self.scale, enable_gqa=query_BQLD.shape[1] != key_BHSD.shape[1],
            )  # fmt: skip
        num_queries, length, num_heads = query_BQLD.shape[1], query_BQLD.shape[2], key_BHSD.shape[1]
        grouped_BHGLD = query_BQLD.reshape(len(query_BQLD), num_heads, -1, *query_BQLD.shape[2:])
        scores_BHGLS = grouped_BHGLD @ key_BHSD[:, :, None].transpose(-1, -2)
        scores_BHGLS = scores_BHGLS.float() * (query_BQLD.shape[-1] ** -0.5 if self.scale is None else self.scale)
        if self.softcap is not None:
            scores_BHGLS = self.softcap * torch.tanh(scores_BHGLS / self.softcap)
        if causal:
            mask = torch.ones(length, length, dtype=torch.bool, device=query_BQLD.device).tril()
        if mask is not None and mask.dtype is torch.bool:
            scores_BHGLS = scores_BHGLS.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores_BHGLS = scores_BHGLS + mask[:, :, None]
        if self.sinks is not None:
            sinks_BHGL1 = self.sinks.float().view(1, num_heads, -1, 1, 1).expand(*scores_BHGLS.shape[:-1], 1)
            scores_BHGLS = torch.cat([scores_BHGLS, sinks_BHGL1], dim=-1)
        weights_BHGLS = F.dropout(scores_BHGLS.softmax(-1)[..., : key_BHSD.shape[2]], self.dropout)
        out_BHGLD = weights_BHGLS.to(value_BHSD.dtype) @ value_BHSD[:, :, None]
        return out_BHGLD.reshape(query_BQLD.shape[0], num_queries, length, -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """Where the samples of a row lie, prepared once for all layers.

    Either `fused` is there, or `blocks` with `scatter`. Compiled blocks take this as an argument, and torch.compile
    makes another graph for every other number or length of a tuple: what differs from row to row is in tensors of at
    least two elements.
    """

    fused: FusedPlan | None
    blocks: tuple[torch.Tensor, ...]
    """int64 (B, L) each: samples of similar length, as the row's token at each place of a padded block; padding repeats
    a sample's last token."""

    scatter: torch.Tensor  # int64 (T,): place of each token in the blocks' outputs laid end to end
    offsets: torch.Tensor  # int64 (S + 1,) on the CPU: where each sample begins, and the row ends
    kernels: Kernels
    prefixes: PrefixPlan | None = None  # beginnings that samples share; None where each has its own

    @property
    def lengths(self) -> list[int]:
        """(S,) tokens of each sample."""
        found: list[int] = self.offsets.diff().tolist()
        return found

    @classmethod
    def from_offsets(
        cls,
        sample_offsets: NDArray[np.int64],
        device: torch.device,
        kernels: Kernels | None = None,
        prefixes: PrefixPlan | None = None,
    ) -> PackedLayout:
        """From (S + 1,) offsets; unfused unless `kernels` is given."""
        kernels = kernels or Kernels()
        starts, lengths = sample_offsets[:-1], np.diff(sample_offsets)
        offsets = torch.from_numpy(sample_offsets.astype(np.int64))
        if kernels.fused:
            plan = FusedPlan.from_offsets(sample_offsets, device, long_from=kernels.long_from)
            _of_any_size(offsets, *vars(plan).values(), *(() if prefixes is None else vars(prefixes).values()))
            nowhere = torch.empty(0, dtype=torch.int64, device=device)
            return cls(fused=plan, blocks=(), scatter=nowhere, offsets=offsets, kernels=kernels, prefixes=prefixes)
        scatter = np.empty(int(sample_offsets[-1]), dtype=np.int64)
        blocks: list[torch.Tensor] = []
        base = 0
        for members in [np.arange(len(lengths))] if kernels.one_block else _similar_lengths(lengths):
            longest = int(lengths[members].max())
            place = np.arange(longest)[None, :]
            gather = starts[members][:, None] + np.minimum(place, lengths[members][:, None] - 1)
            real = place < lengths[members][:, None]
            scatter[gather[real]] = base + np.flatnonzero(real)
            base += gather.size
            blocks.append(upload(gather, device))
        place_T = upload(scatter, device)
        return cls(
            fused=None, blocks=tuple(blocks), scatter=place_T, offsets=offsets, kernels=kernels, prefixes=prefixes
        )

    def of_one(self, length: int) -> PackedLayout:
        """The layout of a row of one sample, on the same device and kernels."""
        return PackedLayout.from_offsets(np.array([0, length]), self.scatter.device, self.kernels)


def _of_any_size(*tensors: torch.Tensor) -> None:
    """Marks sizes that differ from row to row, so that torch.compile's first graph serves all."""
    import torch._dynamo  # takes a second, which models that are not compiled on a GPU do without

    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _similar_lengths(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Indices of samples, none padded beyond BLOCK_GROWTH times its length."""
    order = np.argsort(-lengths, kind="stable")
    groups: list[NDArray[np.int64]] = []
    first = 0
    for index in range(1, len(order) + 1):
        if index == len(order) or lengths[order[index]] * BLOCK_GROWTH < lengths[order[first]]:
            groups.append(order[first:index])
            first = index
    return groups


def use_attention(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> None:
    """Makes the model's layers attend by `function`, under a name in transformers' own table."""
    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)


def packed_attention(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample of a row, in the signature transformers calls.

    Returns (1, T, H, D). K key-value heads serve H query heads. Of `kwargs` it reads dropout, softcap and s_aux (the
    sinks, (H,)), which only unfused kernels take (`needs_unfused`). Where ranks share a row, T counts this rank's
    tokens, and the layout is the whole row's.
    """
    refuse_strange_scores(kwargs)
    # Under autocast the norms of some models hand out float32 queries and keys beside half-precision values.
    query_THD, key_TKD, value_TKD = (
        tensor[0].transpose(0, 1).to(value_1KTD.dtype) for tensor in (query_1HTD, key_1KTD, value_1KTD)
    )
    rules = {"scale": scaling, "window": sliding_window, "dropout": kwargs.get("dropout", 0.0)}
    rules |= {"softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
    share = packed_layout.kernels.context
    if share is None:
        return _attention(query_THD, key_TKD, value_TKD, packed_layout, rules).unsqueeze(0), None
    if rules["sinks"] is not None:
        rules["sinks"] = rules["sinks"][share.own(len(rules["sinks"]))]
    query_THD, key_TKD, value_TKD = share.to_heads(query_THD, key_TKD, value_TKD)
    out_THD = _attention(query_THD, key_TKD, value_TKD, packed_layout, rules)
    return share.to_tokens(out_THD).unsqueeze(0), None


def _attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    layout: PackedLayout,
    rules: Mapping[str, Any],
) -> torch.Tensor:
    """(T, H, D). `rules` are the arguments of a ScoreRule."""
    scale = 1.0 / math.sqrt(query_THD.shape[-1]) if rules["scale"] is None else rules["scale"]
    window = rules["window"]
    if layout.prefixes is not None:
        if window is not None:  # families.prefix_reason names such models
            raise NotImplementedError(f"samples that share their beginning under a sliding window of {window} tokens")
        if layout.fused is not None:
            return fused_prefix_attention(query_THD, key_TKD, value_TKD, layout.fused, layout.prefixes, scale=scale)
        out_THD: torch.Tensor = cpu_prefix_attention(
            query_THD, key_TKD, value_TKD, layout.blocks, layout.scatter, layout.prefixes, scale
        )
        return out_THD
    if layout.fused is not None:  # never with dropout: see PackedPolicy
        return fused_attention(query_THD, key_TKD, value_TKD, layout.fused, scale=scale, window=window)
    blocks_THD: torch.Tensor = _attention_by_blocks(query_THD, key_TKD, value_TKD, layout, rules)
    return blocks_THD


@torch.compiler.disable  # type: ignore[untyped-decorator]  # every row's blocks have other shapes: never compiled
def _attention_by_blocks(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    layout: PackedLayout,
    arguments: Mapping[str, Any],
) -> torch.Tensor:
    rule = ScoreRule(**arguments)
    outputs = [_block_attention(query_THD, key_TKD, value_TKD, gather, rule) for gather in layout.blocks]
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat.index_select(0, layout.scatter)


def _block_attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    gather_BL: torch.Tensor,
    rule: ScoreRule,
) -> torch.Tensor:
    """Causal attention of one padded block. Returns (B * L, H, D). Padding comes after every real query's keys."""
    query_BHLD, key_BKLD, value_BKLD = (in_block(tensor, gather_BL) for tensor in (query_THD, key_TKD, value_TKD))
    groups = query_BHLD.shape[1] // key_BKLD.shape[1]
    key_BKLD, value_BKLD = repeated(key_BKLD, groups), repeated(value_BKLD, groups)
    mask_LL = window_mask(gather_BL.shape[1], rule.window, query_BHLD.device)
    out_BHLD = rule.attend(query_BHLD, key_BKLD, value_BKLD, mask=mask_LL, causal=mask_LL is None)
    return out_BHLD.transpose(1, 2).flatten(0, 1)


def window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """(L, L) true where a token sees another within a sliding window. None for plain causality."""
    if window is None or length <= window:
        return None
    place = torch.arange(length, device=device)
    distance_LL = place[:, None] - place[None, :]
    return (distance_LL >= 0) & (distance_LL < window)


STRANGE_SCORES = ("indices", "block_indices", "position_bias")


def refuse_strange_scores(arguments: Mapping[str, object]) -> None:
    """Raises NotImplementedError for arguments that this attention would drop."""
    if strange := [name for name in STRANGE_SCORES if arguments.get(name) is not None]:
        raise NotImplementedError(
            f"this model's attention takes {strange[0]!r}, which attention over packed rows and slots does not have; "
            "add its model_type to UNPACKED_TYPES in meshrl.models.families"
        )
