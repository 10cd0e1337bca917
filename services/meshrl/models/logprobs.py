"""Logprobs of given tokens under the current policy, for packed rows; the trainers' forward pass.

Shapes: T tokens of a row, N predicted tokens (those that a loss looks at), V vocabulary, E hidden size,
K candidates of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from meshrl.models.attention import (
    AttentionName,
    Kernels,
    PackedLayout,
    choose_kernels,
    enable_packed_attention,
)
from meshrl.models.families import (
    UNTRAINABLE_TYPES,
    needs_unfused,
    positions_grow_beyond,
    prefix_reason,
    unpacked_reason,
)
from meshrl.models.head import head_logprobs

# Models that change the logits after the output head name it with one of these; for them the head is not taken apart.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRow:
    """One packed row on the model's device, and which of its tokens are predicted."""

    token_ids: torch.Tensor  # int64 (T,)
    position_ids: torch.Tensor  # int64 (T,), restart with each sample at the length of its shared prefix
    layout: PackedLayout
    predicted: torch.Tensor  # int64 (N,) index of each predicted token in the row
    sources: torch.Tensor  # int64 (N,) index of the token that predicts it: the one before it, or its prefix's last
    temperatures: torch.Tensor  # float32 (N,), above 0
    candidates: torch.Tensor | None = None  # int64 (N, K) other tokens whose logprobs in its place are wanted


class PackedPolicy(nn.Module):
    """A causal LM as a function from packed rows to token logprobs.

    Any Hugging Face causal LM that `families` does not refuse works: one whose attention cannot be replaced runs on
    padded rows of one sample each, which costs padding and gives the same numbers. `max_logits_bytes` bounds the
    float32 logits there are at once; they are made a piece at a time, and again in the backward pass. `kernels` is what
    rows must be laid out for. `prefix_reason` says why samples of a row cannot share their beginning, None if they can.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute_dtype: torch.dtype = torch.float32,
        max_logits_bytes: int = 1 << 28,
        attn: AttentionName = "auto",
        device: torch.device | None = None,
        autocast: bool = True,
        compile_head: bool = False,
        one_pass: bool = False,
    ) -> None:
        """`autocast` is off where the parameters themselves come in compute_dtype; `device` where the model is meta.

        `one_pass`: each row takes one forward pass of the model, whatever its samples, since other ranks wait in it;
        padded rows then are as long as the longest sample. Raises ValueError for a model that cannot be trained and for
        an attention that cannot run here.
        """
        super().__init__()
        if (reason := UNTRAINABLE_TYPES.get(model.config.get_text_config().model_type)) is not None:
            raise ValueError(
                f"a model of type {model.config.model_type!r} cannot be trained: {reason}; take another one"
            )
        self.model = model
        self.unpacked_reason = unpacked_reason(model)
        self.packed = self.unpacked_reason is None
        self._fixed_positions = positions_grow_beyond(model.config.get_text_config())
        self._one_pass = one_pass
        device = device or model.device
        dtype = model.dtype if compute_dtype is torch.float32 else compute_dtype
        self.kernels = Kernels(one_block=one_pass)
        if self.packed:
            enable_packed_attention(model)
            dropout = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
            self.kernels = choose_kernels("sdpa" if dropout or needs_unfused(model) else attn, device, dtype)
        self.prefix_reason = self.unpacked_reason or prefix_reason(model)
        if self.prefix_reason is None and not self.kernels.fused and device.type != "cpu":
            self.prefix_reason = "its attention kernels here take none"
        self._compute_dtype = compute_dtype
        self._autocast = autocast and compute_dtype is not torch.float32
        self._max_logits_bytes = max_logits_bytes
        self._compile_head = compile_head

    def forward(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs (N,) and entropies (N,) of the row's predicted tokens, float32; entropies carry no gradient.

        For a row with candidates logprobs are (N, 1 + K): of the predicted token, then of its candidates.
        """
        if self._must_split(row):
            parts = [self(sample) for sample in _samples(row)]
            return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])
        sources_N = row.sources
        targets_N = row.token_ids[row.predicted]
        if row.candidates is not None:
            targets_N = torch.cat([targets_N[:, None], row.candidates], dim=1)
        with torch.autocast(row.token_ids.device.type, self._compute_dtype, enabled=self._autocast):
            if not self.packed:
                return token_logprobs(self._padded_logits(row, sources_N), targets_N, row.temperatures)
            inputs = {
                "input_ids": row.token_ids[None],
                "position_ids": row.position_ids[None],
                "use_cache": False,
                "packed_layout": row.layout,
            }
            if self._transforms_logits():
                logits_1NV = self.model(**inputs, logits_to_keep=sources_N).logits
                return token_logprobs(logits_1NV[0], targets_N, row.temperatures)
            hidden_1TE = self.model.base_model(**inputs).last_hidden_state
            return self._head(hidden_1TE[0, sources_N], targets_N, row.temperatures)

    def _must_split(self, row: PackedRow) -> bool:
        """Whether rotary embeddings that follow the longest sequence of a pass would be wrong for other samples."""
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

    def _transforms_logits(self) -> bool:
        config = self.model.config.get_text_config()
        return any(getattr(config, name, None) not in (None, 1, 1.0) for name in LOGIT_TRANSFORMS)

    def _head(
        self, hidden_NE: torch.Tensor, targets_N: torch.Tensor, temperatures_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = self.model.get_output_embeddings()
        if type(head) is nn.Linear:
            dtype = self._compute_dtype if self._autocast else head.weight.dtype
            with torch.autocast(hidden_NE.device.type, enabled=False):  # the head looks after its own precision
                return head_logprobs(
                    hidden_NE.to(dtype),
                    head.weight.to(dtype),
                    head.bias,
                    targets_N,
                    temperatures_N,
                    max_logits_bytes=self._max_logits_bytes,
                    compiled=self._compile_head,
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
            for start in range(0, len(targets_N), piece)
        ]
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])

    def _padded_logits(self, row: PackedRow, sources_N: torch.Tensor) -> torch.Tensor:
        """Logits (N, V) at the sources, computed with one padded row per sample; right padding needs no mask."""
        place_N = row.layout.scatter[sources_N]
        logits_NV: torch.Tensor | None = None
        base = 0
        for block in row.layout.blocks:
            logits_BLV: torch.Tensor = self.model(input_ids=row.token_ids[block.gather], use_cache=False).logits
            flat_PV = logits_BLV.flatten(0, 1)
            here_N = (place_N >= base) & (place_N < base + len(flat_PV))
            if logits_NV is None:
                logits_NV = flat_PV.new_zeros((len(place_N), flat_PV.shape[-1]))
            logits_NV = logits_NV.index_put((here_N.nonzero()[:, 0],), flat_PV[place_N[here_N] - base])
            base += len(flat_PV)
        assert logits_NV is not None, "a row has a sample"
        return logits_NV


def _samples(row: PackedRow) -> Iterator[PackedRow]:
    """The row's samples, each as a row of its own with the same kernels."""
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
        )
        start = end


def token_logprobs(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, temperatures_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the targets under softmax(logits / temperature), and the entropy of that distribution, in nats.

    Targets may be several a token; logprobs are of the same shape.
    """
    logprobs_NV = torch.log_softmax(logits_NV.float() / temperatures_N[:, None], dim=-1)
    logprobs_N = logprobs_NV.gather(1, targets_N.reshape(len(logprobs_NV), -1)).reshape(targets_N.shape)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_N, entropy_N
