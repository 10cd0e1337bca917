"""Logprobs of given tokens under the current policy, for packed rows; the trainers' forward pass ends here.

Shapes: T tokens of a row, S samples, N predicted tokens (those with a loss), V vocabulary, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from meshrl.models.attention import PackedLayout, enable_packed_attention, supports_packed_attention

# Models that change the logits after the output head name it with one of these; for them the head is not taken apart.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRow:
    """One packed row on the model's device, and which of its tokens are predicted."""

    token_ids: torch.Tensor  # int64 (T,)
    position_ids: torch.Tensor  # int64 (T,), restart at 0 with each sample
    layout: PackedLayout
    predicted: torch.Tensor  # int64 (N,) index of each predicted token in the row; never a sample's first
    temperatures: torch.Tensor  # float32 (N,), above 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Of each predicted token; `entropy` carries no gradient. Both float32."""

    logprobs: torch.Tensor  # (N,)
    entropy: torch.Tensor  # (N,)


class PackedPolicy:
    """A causal LM as a function from packed rows to token logprobs.

    Any Hugging Face causal LM works: one whose attention cannot be replaced runs on padded rows of one sample each,
    which costs padding and gives the same numbers. `max_logits_bytes` bounds the float32 logits kept at once; above it
    they are made in pieces, and made again in the backward pass.
    """

    def __init__(
        self, model: PreTrainedModel, *, compute_dtype: torch.dtype = torch.float32, max_logits_bytes: int = 1 << 28
    ) -> None:
        self.model = model
        self._compute_dtype = compute_dtype
        self._max_logits_bytes = max_logits_bytes
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self.packed = supports_packed_attention(model)
        if self.packed:
            enable_packed_attention(model)

    def __call__(self, row: PackedRow) -> TokenLogprobs:
        """Differentiable logprobs and entropies of the row's predicted tokens."""
        sources_N = row.predicted - 1
        targets_N = row.token_ids[row.predicted]
        device_type = row.token_ids.device.type
        with torch.autocast(device_type, self._compute_dtype, enabled=self._compute_dtype is not torch.float32):
            if not self.packed:
                return token_logprobs(self._padded_logits(row)[sources_N], targets_N, row.temperatures)
            if len(sources_N) * self._vocab_size * 4 <= self._max_logits_bytes or self._transforms_logits():
                logits_1NV = self.model(
                    input_ids=row.token_ids[None],
                    position_ids=row.position_ids[None],
                    use_cache=False,
                    logits_to_keep=sources_N,
                    packed_layout=row.layout,
                ).logits
                return token_logprobs(logits_1NV[0], targets_N, row.temperatures)
            hidden_1TE = self.model.base_model(
                input_ids=row.token_ids[None],
                position_ids=row.position_ids[None],
                use_cache=False,
                packed_layout=row.layout,
            ).last_hidden_state
            return self._in_pieces(hidden_1TE[0, sources_N], targets_N, row.temperatures)

    def _transforms_logits(self) -> bool:
        config = self.model.config.get_text_config()
        return any(getattr(config, name, None) not in (None, 1, 1.0) for name in LOGIT_TRANSFORMS)

    def _in_pieces(
        self, hidden_NE: torch.Tensor, targets_N: torch.Tensor, temperatures_N: torch.Tensor
    ) -> TokenLogprobs:
        head = self.model.get_output_embeddings()
        piece = max(1, self._max_logits_bytes // (self._vocab_size * 4))
        parts = [
            checkpoint(
                _head_logprobs,
                head,
                hidden_NE[start : start + piece],
                targets_N[start : start + piece],
                temperatures_N[start : start + piece],
                use_reentrant=False,
            )
            for start in range(0, len(targets_N), piece)
        ]
        return TokenLogprobs(
            logprobs=torch.cat([logprobs for logprobs, _ in parts]),
            entropy=torch.cat([entropy for _, entropy in parts]),
        )

    def _padded_logits(self, row: PackedRow) -> torch.Tensor:
        """Logits (T, V) of the row, computed with one padded row per sample; right padding needs no mask."""
        parts = []
        for block in row.layout.blocks:
            logits_BLV = self.model(input_ids=row.token_ids[block.gather], use_cache=False).logits
            parts.append(logits_BLV.flatten(0, 1))
        return torch.cat(parts)[row.layout.scatter]


def token_logprobs(logits_NV: torch.Tensor, targets_N: torch.Tensor, temperatures_N: torch.Tensor) -> TokenLogprobs:
    """Logprobs of the targets under softmax(logits / temperature), and the entropy of that distribution, in nats."""
    logprobs_NV = torch.log_softmax(logits_NV.float() / temperatures_N[:, None], dim=-1)
    logprobs_N = logprobs_NV.gather(1, targets_N[:, None]).squeeze(1)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return TokenLogprobs(logprobs=logprobs_N, entropy=entropy_N)


def _head_logprobs(
    head: nn.Module, hidden_NE: torch.Tensor, targets_N: torch.Tensor, temperatures_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    result = token_logprobs(head(hidden_NE), targets_N, temperatures_N)
    return result.logprobs, result.entropy
