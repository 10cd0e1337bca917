"""The KV cache of the embedded engine, of fixed size, and the attention that reads it; each step writes into it.

One step is a flat row of T tokens: first one token for each decoding slot (slots 0..R-1, in order), then the prompt
pieces being prefilled. Shapes: S slots, M tokens a slot, R decoding rows, T tokens of the step, H key-value heads, Q
query heads, G = Q/H, D head width, L tokens attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from meshrl.models.attention import ScoreRule, refuse_strange_scores, window_mask

ATTENTION_NAME = "meshrl_slots"
PLAN_ARGUMENT = "slot_plan"
PROBE_ARGUMENT = "slot_probe"


@dataclass(frozen=True)
class Segment:
    """`length` prompt tokens from position `start` on, at `offset` of the flat row."""

    slot: int
    start: int
    length: int
    offset: int


class SlotLayer:
    """Keys and values of one call of attention: (S, H, M, D); zeroed, as masked garbage can be NaN."""

    def __init__(self, num_slots: int, max_len: int, key_like: torch.Tensor, value_like: torch.Tensor) -> None:
        self.num_heads = key_like.shape[1]
        self.keys = key_like.new_zeros((num_slots, self.num_heads, max_len, key_like.shape[-1]))
        self.values = value_like.new_zeros((num_slots, self.num_heads, max_len, value_like.shape[-1]))

    def write(self, key_1HTD: torch.Tensor, value_1HTD: torch.Tensor, plan: StepPlan) -> None:
        index = plan.flat_index(self.num_heads)
        self.keys.view(-1, self.keys.shape[-1]).index_copy_(0, index, _flat(key_1HTD))
        self.values.view(-1, self.values.shape[-1]).index_copy_(0, index, _flat(value_1HTD))


class SlotCache:
    """The keys and values of each call of attention in a forward pass, in the order of the calls.

    A cache of transformers holds what a layer chose to keep, which need not be what its attention attends to (latents,
    shared or split heads).
    """

    def __init__(self, layers: Sequence[SlotLayer]) -> None:
        self.layers = tuple(layers)

    def copy_slot(self, source: int, target: int, length: int) -> None:
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def swap_slots(self, one: int, other: int, length: int) -> None:
        for layer in self.layers:
            for store in (layer.keys, layer.values):
                kept = store[one, :, :length].clone()
                store[one, :, :length] = store[other, :, :length]
                store[other, :, :length] = kept

    def clear_slot(self, slot: int, length: int) -> None:
        for layer in self.layers:
            layer.keys[slot, :, :length].zero_()
            layer.values[slot, :, :length].zero_()


class StepPlan:
    """Where each token of a step goes, and the masks, built once for all layers. Good for one forward pass, as each
    call of attention takes the `next_layer`."""

    def __init__(
        self, *, cache: SlotCache, max_len: int, slots_T: torch.Tensor, positions_T: torch.Tensor, rows: int,
        extent: int, ragged: bool, segments: Sequence[Segment], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._layers = iter(cache.layers)
        self.max_len = max_len
        self.slots_T = slots_T
        self.positions_T = positions_T
        self.rows = rows
        self.extent = extent  # L of the decoding rows: the longest of them
        self.ragged = ragged  # some decoding row must not see all of the extent
        self.segments = tuple(segments)
        self.dtype = dtype
        self._index: dict[int, torch.Tensor] = {}
        self._decode_masks: dict[int | None, torch.Tensor] = {}
        self._segment_masks: dict[tuple[int, int, int | None], torch.Tensor] = {}

    def next_layer(self) -> SlotLayer:
        return next(self._layers)

    def flat_index(self, num_heads: int) -> torch.Tensor:
        index = self._index.get(num_heads)
        if index is None:
            heads_H = torch.arange(num_heads, device=self.slots_T.device)
            index = ((self.slots_T[:, None] * num_heads + heads_H) * self.max_len + self.positions_T[:, None]).view(-1)
            self._index[num_heads] = index
        return index

    def decode_mask(self, window: int | None) -> torch.Tensor | None:
        """(R, 1, 1, L) additive mask: a row sees its own positions, the newest included. None: all see everything."""
        if not self.ragged and (window is None or window >= self.extent):
            return None
        mask = self._decode_masks.get(window)
        if mask is None:
            keys_L = torch.arange(self.extent, device=self.positions_T.device)
            positions_R1 = self.positions_T[: self.rows, None]
            hidden_RL = keys_L > positions_R1
            if window is not None:
                hidden_RL |= keys_L <= positions_R1 - window
            mask = torch.zeros(hidden_RL.shape, dtype=self.dtype, device=hidden_RL.device)
            mask = mask.masked_fill_(hidden_RL, float("-inf"))[:, None, None, :]
            self._decode_masks[window] = mask
        return mask

    def segment_mask(self, start: int, length: int, window: int | None) -> torch.Tensor:
        """(length, start + length) true where token start+i may see token j."""
        mask = self._segment_masks.get((start, length, window))
        if mask is None:
            keys = torch.arange(start + length, device=self.positions_T.device)
            queries = torch.arange(start, start + length, device=self.positions_T.device)[:, None]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self._segment_masks[start, length, window] = mask
        return mask


def _flat(states_1HTD: torch.Tensor) -> torch.Tensor:
    """(T*H, D), token by token; a view when the projection wrote token by token, as it does."""
    return states_1HTD[0].transpose(0, 1).reshape(-1, states_1HTD.shape[-1])


def slot_attention(
    module: torch.nn.Module,
    query_1QTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    value_1HTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one step over the slots; returns (1, T, Q, D). Called by the stock modeling code.

    `options` are those of transformers' attention functions, and the step's plan; without one a forward pass is a plain
    one over whole sequences.
    """
    refuse_strange_scores(options)
    rule = ScoreRule(
        scale=options.get("scaling"),
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    plan: StepPlan | None = options.get(PLAN_ARGUMENT)
    if plan is None:
        if (seen := options.get(PROBE_ARGUMENT)) is not None:
            seen.append((key_1HTD, value_1HTD))
        mask_TT = window_mask(query_1QTD.shape[2], rule.window, query_1QTD.device)
        whole_1QTD = rule.attend(query_1QTD, key_1HTD, value_1HTD, mask=mask_TT, causal=mask_TT is None)
        return whole_1QTD.transpose(1, 2), None
    layer = plan.next_layer()
    layer.write(key_1HTD, value_1HTD, plan)
    decoded_RQD = None
    if plan.rows:
        decoded_RQD = _attend_rows(query_1QTD, layer, plan, rule)
        if not plan.segments:
            return decoded_RQD[None], None
    _, num_queries, num_tokens, _ = query_1QTD.shape
    out_TQD = query_1QTD.new_empty((num_tokens, num_queries, value_1HTD.shape[-1]))
    if decoded_RQD is not None:
        out_TQD[: plan.rows] = decoded_RQD
    for segment in plan.segments:
        span = slice(segment.offset, segment.offset + segment.length)
        end = segment.start + segment.length
        whole = segment.start == 0 and rule.window is None
        seen_1QLD = rule.attend(
            query_1QTD[:, :, span],
            key_1HTD[:, :, span] if whole else layer.keys[segment.slot, None, :, :end],
            value_1HTD[:, :, span] if whole else layer.values[segment.slot, None, :, :end],
            mask=None if whole else plan.segment_mask(segment.start, segment.length, rule.window),
            causal=whole,
        )
        out_TQD[span] = seen_1QLD[0].transpose(0, 1)
    return out_TQD[None], None


def _attend_rows(query_1QTD: torch.Tensor, layer: SlotLayer, plan: StepPlan, rule: ScoreRule) -> torch.Tensor:
    """(R, Q, D); queries that share a key-value head go as one small matrix."""
    rows, num_queries = plan.rows, query_1QTD.shape[1]
    keys, values = layer.keys[:rows, :, : plan.extent], layer.values[:rows, :, : plan.extent]
    mask = plan.decode_mask(rule.window)
    if not rule.plain:
        query_RQ1D = query_1QTD[0, :, :rows].transpose(0, 1)[:, :, None]
        return rule.attend(query_RQ1D, keys, values, mask=mask, causal=False)[:, :, 0]
    query_RHGD = query_1QTD[0, :, :rows].transpose(0, 1).reshape(rows, layer.num_heads, -1, query_1QTD.shape[-1])
    seen_RHGD = F.scaled_dot_product_attention(query_RHGD, keys, values, attn_mask=mask, scale=rule.scale)
    return seen_RHGD.reshape(rows, num_queries, -1)


def probe_layers(model: PreTrainedModel) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Of one token in each call of attention, with the shapes and dtypes of the cache."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, position_ids=token, use_cache=False, **{PROBE_ARGUMENT: seen})
    return tuple(seen)


def bytes_per_slot(states: Sequence[tuple[torch.Tensor, torch.Tensor]], max_len: int) -> int:
    return sum((key.nbytes + value.nbytes) * max_len for key, value in states)
