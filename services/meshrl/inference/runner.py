"""Runs one step of the model: takes what the scheduler planned, returns a sampled token for each decoding row.

Shapes: R decoding rows, T tokens of the step (rows first, then prompt pieces), V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from meshrl.inference.cache import (
    PLAN_ARGUMENT,
    Segment,
    SlotCache,
    SlotLayer,
    StepPlan,
    bytes_per_slot,
    probe_layers,
    register_attention,
)
from meshrl.inference.engine import GREEDY_BELOW
from meshrl.inference.sampling import BatchSampling, sample, uniforms
from meshrl.inference.scheduler import PrefillPiece, SlotTable

GPU_BLOCK = 64
# not cuDNN: it plans anew for every length, which takes longer than the step
GPU_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepOutput:
    """What one step sampled, on the host."""

    token_ids: NDArray[np.int64]  # (R,)
    logprobs: NDArray[np.float32]  # (R,)
    raw_logprobs: NDArray[np.float32] | None  # (R,)
    alternatives: tuple[NDArray[np.int64], NDArray[np.float32]] | None  # (R, K) each


class ModelRunner:
    """The model with its slot cache. Used by one thread at a time."""

    def __init__(self, model: PreTrainedModel, *, num_slots: int, max_len: int, kv_cache_bytes: int | None) -> None:
        """Allocates the cache; with a bound on its bytes there may be fewer slots than asked for.

        Raises: ValueError when not even one slot fits, or the model keeps more than keys and values.
        """
        states = probe_layers(model)
        slot_bytes = bytes_per_slot(states, max_len)
        if kv_cache_bytes is not None:
            num_slots = min(num_slots, kv_cache_bytes // slot_bytes)
        if num_slots < 1:
            raise ValueError(
                f"one sequence of max_model_len {max_len} takes {slot_bytes} bytes of KV cache, more than the bound of "
                f"{kv_cache_bytes}; raise kv_cache_bytes or lower max_model_len"
            )
        self.model = model
        self.num_slots = num_slots
        self.max_len = max_len
        self.device = model.device
        self.cache = SlotCache([SlotLayer(num_slots, max_len, key, value) for key, value in states])
        register_attention(model)
        self._params = BatchSampling()

    def step(self, table: SlotTable, pieces: Sequence[PrefillPiece]) -> StepOutput | None:
        """One forward pass over the decoding rows and the prompt pieces; None when no row decodes."""
        rows = table.decoding
        with torch.inference_mode():
            logits_RV = self._forward(table, pieces)
            if rows == 0:
                return None
            if table.changed:
                self._params = self._read_params(table)
                table.changed = False
            self._forbid_early_stops(logits_RV, table)
            live = table.slots[:rows]
            uniforms_R = uniforms(live["key"], live["generated"].astype(np.uint64))
            sampled = sample(logits_RV, torch.from_numpy(uniforms_R).to(self.device), self._params)
            tops = None
            if sampled.top_ids is not None and sampled.top_logprobs is not None:
                tops = sampled.top_ids.cpu().numpy(), sampled.top_logprobs.cpu().numpy()
            return StepOutput(
                token_ids=sampled.token_ids.cpu().numpy(),
                logprobs=sampled.logprobs.cpu().numpy(),
                raw_logprobs=None if sampled.raw_logprobs is None else sampled.raw_logprobs.cpu().numpy(),
                alternatives=tops,
            )

    def _forward(self, table: SlotTable, pieces: Sequence[PrefillPiece]) -> torch.Tensor:
        """(R, V) logits of the decoding rows."""
        rows = table.decoding
        token_ids, positions = table.decode_inputs()
        slots = np.arange(rows)
        segments: list[Segment] = []
        if pieces:
            lengths = [len(piece.tokens) for piece in pieces]
            offsets = rows + np.cumsum([0, *lengths[:-1]])
            segments = [
                Segment(piece.row.slot, piece.start, length, int(offset))
                for piece, length, offset in zip(pieces, lengths, offsets, strict=True)
            ]
            token_ids = np.concatenate([token_ids, *(piece.tokens for piece in pieces)])
            positions = np.concatenate([positions, *(np.arange(s.start, s.start + s.length) for s in segments)])
            slots = np.concatenate([slots, np.repeat([s.slot for s in segments], lengths)])
        extent = self._extent(int(positions[:rows].max()) + 1) if rows else 0
        plan = StepPlan(
            max_len=self.max_len,
            slots_T=torch.from_numpy(slots).to(self.device),
            positions_T=torch.from_numpy(positions).to(self.device),
            rows=rows,
            extent=extent,
            ragged=rows > 0 and extent > int(positions[:rows].min()) + 1,
            segments=segments,
            dtype=self.cache.slot_layers[0].keys.dtype,
        )
        self.cache.begin(plan)
        with sdpa_kernel(GPU_ATTENTION) if self.device.type == "cuda" else nullcontext():
            output = self.model(
                input_ids=torch.from_numpy(token_ids).to(self.device)[None],
                position_ids=plan.positions_T[None],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=torch.arange(rows, device=self.device) if segments else 0,
                **{PLAN_ARGUMENT: plan, "slot_layers": self.cache.slot_layers},
            )
        logits_RV: torch.Tensor = output.logits[0]
        return logits_RV

    def _extent(self, longest: int) -> int:
        """Tokens that decoding rows attend to; on a GPU in blocks, since its kernels want aligned masks."""
        if self.device.type != "cuda":
            return longest
        return min(-(-longest // GPU_BLOCK) * GPU_BLOCK, self.max_len)

    def _read_params(self, table: SlotTable) -> BatchSampling:
        """Turns the rows' parameters into tensors; leaves out what no row uses."""
        live = table.slots[: table.decoding]
        greedy = live["temperature"] < GREEDY_BELOW
        temperature = np.where(greedy, np.float32(1.0), live["temperature"])
        cuts_top_k, cuts_top_p, cuts_min_p = live["top_k"] > 0, live["top_p"] < 1.0, live["min_p"] > 0.0
        cut_rows = np.flatnonzero(~greedy & (cuts_top_k | cuts_top_p | cuts_min_p))
        vocabulary = self.model.config.get_text_config().vocab_size
        top_k = np.where(cuts_top_k, np.minimum(live["top_k"], vocabulary), vocabulary)
        params = [row.request.sampling for row in table.rows[: table.decoding]]

        def column(values: NDArray[np.generic], wanted: bool) -> torch.Tensor | None:
            return torch.from_numpy(values[cut_rows][:, None]).to(self.device) if wanted else None

        return BatchSampling(
            temperature=(
                torch.from_numpy(temperature[:, None]).to(self.device) if (temperature != 1.0).any() else None
            ),
            greedy=torch.from_numpy(greedy).to(self.device) if greedy.any() else None,
            cut_rows=torch.from_numpy(cut_rows).to(self.device) if len(cut_rows) else None,
            min_p=column(live["min_p"], bool(cuts_min_p[cut_rows].any())),
            top_k=column(top_k, bool(cuts_top_k[cut_rows].any())),
            top_p=column(live["top_p"], bool(cuts_top_p[cut_rows].any())),
            num_alternatives=max((each.top_logprobs for each in params), default=0),
            raw=any(each.raw_logprobs for each in params),
        )

    def _forbid_early_stops(self, logits_RV: torch.Tensor, table: SlotTable) -> None:
        live = table.slots[: table.decoding]
        for slot in np.flatnonzero(live["generated"] < live["min_tokens"]):
            stops = table.stop_SW[slot]
            logits_RV[slot, torch.from_numpy(stops[stops >= 0]).to(self.device)] = -torch.inf
