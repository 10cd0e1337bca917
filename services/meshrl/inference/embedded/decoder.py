"""One step of a small Llama-like decoder in few torch calls: on a CPU each call costs as much as its arithmetic.

transformers makes some seventy calls a layer; a token of a small model spends most of its time between them. Here
projections that read the same input are one matrix, the heads of queries and keys are normalised and rotated together,
and rotations come from a table. Attention is that of `cache`. Only for models that this reproduces: `of` computes a
sequence both ways first. It holds copies of some weights, so `weights_changed` follows each swap.

Shapes: T tokens of the step, E width of the model, I inputs, O outputs, Q query heads, H key-value heads, D head width,
M tokens a slot, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from loguru import logger
from torch import nn
from transformers import PreTrainedModel

from meshrl.inference.embedded.cache import PLAN_ARGUMENT, Segment, SlotCache, StepPlan, slot_attention

MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3"})  # one decoder layer, but for biases and the norm of the heads
FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})  # the same for a position, however long the row
MOST_PARAMETERS = 100_000_000  # beyond it matrix products take the time, and copies of weights the memory
PROBED_TOKENS = 16
TOLERANCE = 1e-4  # of the largest logit; sums in another order differ by some 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class _Projection:
    """One matrix over all its outputs."""

    weight: torch.Tensor  # (O, I)
    bias: torch.Tensor | None  # (O,)

    @staticmethod
    def joined(*parts: nn.Linear) -> _Projection:
        weights: list[torch.Tensor] = [part.weight for part in parts]
        biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
        return _Projection(weight=torch.cat(weights), bias=torch.cat(biases) if biases else None)

    def __call__(self, inputs_TI: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs_TI, self.weight, self.bias)


def _linear(parent: nn.Module, name: str) -> nn.Linear:
    """A linear layer of the model. Raises TypeError for any other, such as a quantised one."""
    module = parent.get_submodule(name)
    if type(module) is not nn.Linear:
        raise TypeError(f"{name} is a {type(module).__name__}")
    return module


class _Norm:
    """RMSNorm over the last dimension (arXiv 1910.07467)."""

    def __init__(self, module: nn.Module) -> None:
        self._weight = module.get_parameter("weight")
        self._eps = float(module.variance_epsilon)  # type: ignore[arg-type]  # a number in these model types

    def __call__(self, inputs_TE: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(inputs_TE, self._weight.shape, self._weight, self._eps)


class _Layer:
    """One decoder layer, with the weights that it has now."""

    def __init__(self, module: nn.Module, head_dim: int) -> None:
        self._attention = attention = module.get_submodule("self_attn")
        mlp = module.get_submodule("mlp")
        q, k, v = (_linear(attention, f"{name}_proj") for name in "qkv")
        self._head_dim = head_dim
        self._num_queries, num_keys = q.out_features // head_dim, k.out_features // head_dim
        self._num_rotated = self._num_queries + num_keys
        self._qkv = _Projection.joined(q, k, v)
        self._out = _Projection.joined(_linear(attention, "o_proj"))
        self._gate_up = _Projection.joined(_linear(mlp, "gate_proj"), _linear(mlp, "up_proj"))
        self._down = _Projection.joined(_linear(mlp, "down_proj"))
        self._activation: Callable[[torch.Tensor], torch.Tensor] = mlp.get_submodule("act_fn")
        self._before, self._between = (
            _Norm(module.get_submodule(name)) for name in ("input_layernorm", "post_attention_layernorm")
        )
        self._head_weight: torch.Tensor | None = None  # (Q+H, D)
        self._head_eps = 0.0
        if hasattr(attention, "q_norm"):
            norms = [attention.get_submodule("q_norm")] * self._num_queries + [
                attention.get_submodule("k_norm")
            ] * num_keys
            self._head_weight = torch.stack([norm.get_parameter("weight") for norm in norms])
            self._head_eps = float(norms[0].variance_epsilon)  # type: ignore[arg-type]  # a number in these model types
        self._options = {"scaling": attention.scaling, "sliding_window": getattr(attention, "sliding_window", None)}

    def __call__(
        self, hidden_TE: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor, plan: StepPlan
    ) -> torch.Tensor:
        """The layer's output, (T, E)."""
        heads_TND = self._qkv(self._before(hidden_TE)).view(len(hidden_TE), -1, self._head_dim)
        turned = heads_TND[:, : self._num_rotated]
        if self._head_weight is not None:
            turned = F.rms_norm(turned, (self._head_dim,), None, self._head_eps) * self._head_weight
        turned = torch.addcmul(turned * cos_T1D, turned.roll(self._head_dim // 2, -1), sin_T1D)
        query, key = turned[:, : self._num_queries], turned[:, self._num_queries :]
        value = heads_TND[:, self._num_rotated :]
        query_1QTD, key_1HTD, value_1HTD = (each.transpose(0, 1)[None] for each in (query, key, value))
        options = {**self._options, PLAN_ARGUMENT: plan}
        seen, _ = slot_attention(self._attention, query_1QTD, key_1HTD, value_1HTD, None, **options)
        hidden_TE = hidden_TE + self._out(seen.reshape(len(hidden_TE), -1))
        gate, up = self._gate_up(self._between(hidden_TE)).chunk(2, -1)
        return hidden_TE + self._down(self._activation(gate) * up)


class SmallDecoder:
    """The forward pass of one model."""

    def __init__(self, model: PreTrainedModel, max_len: int) -> None:
        self._model = model
        self._max_len = max_len
        self.weights_changed()

    @staticmethod
    def of(model: PreTrainedModel, cache: SlotCache, max_len: int) -> SmallDecoder | None:
        """The decoder of a model that it reproduces, else None. Writes to the first slot of `cache` and clears it."""
        config = model.config.get_text_config()
        rotation = getattr(config, "rope_parameters", None) or {}
        if (
            model.device.type != "cpu"
            or model.dtype != torch.float32
            or config.model_type not in MODEL_TYPES
            or rotation.get("rope_type") not in FIXED_ROTATIONS
            or model.num_parameters() > MOST_PARAMETERS
        ):
            return None
        try:
            decoder = SmallDecoder(model, max_len)
        except TypeError as error:
            logger.debug("{} runs as transformers runs it: {}", type(model).__name__, error)
            return None
        difference = decoder._difference(cache)
        if difference > TOLERANCE:
            logger.warning(
                "{} runs as transformers runs it: the logits differ by {:.1e}", type(model).__name__, difference
            )
            return None
        return decoder

    def weights_changed(self) -> None:
        """Reads the model's weights again."""
        decoder = self._model.get_decoder()
        head_dim = decoder.layers[0].self_attn.head_dim
        self._layers = [_Layer(layer, head_dim) for layer in decoder.layers]
        self._norm = _Norm(decoder.norm)
        self._embedding = decoder.embed_tokens.weight
        self._head = _Projection.joined(self._model.get_output_embeddings())
        positions_1M = torch.arange(self._max_len)[None]
        cos_1MD, sin_1MD = decoder.rotary_emb(self._embedding, positions_1M)
        half = head_dim // 2
        self._cos_M1D = cos_1MD[0, :, None]
        self._sin_M1D = torch.cat([-sin_1MD[0, :, None, :half], sin_1MD[0, :, None, half:]], -1)

    def logits(self, token_ids_T: torch.Tensor, plan: StepPlan, rows: int) -> torch.Tensor:
        """(rows, V) logits of the first tokens of the step."""
        hidden_TE = F.embedding(token_ids_T, self._embedding)
        cos_T1D, sin_T1D = self._cos_M1D[plan.positions_T], self._sin_M1D[plan.positions_T]
        for layer in self._layers:
            hidden_TE = layer(hidden_TE, cos_T1D, sin_T1D, plan)
        return self._head(self._norm(hidden_TE[:rows]))

    def _difference(self, cache: SlotCache) -> float:
        """Largest difference from the model's own logits over one sequence, as a share of the largest logit."""
        length = min(PROBED_TOKENS, self._max_len)
        vocabulary = len(self._embedding)
        token_ids_T = torch.arange(length) * 7919 % vocabulary

        def plan() -> StepPlan:
            return StepPlan(
                cache=cache, max_len=self._max_len, slots_T=torch.zeros(length, dtype=torch.long),
                positions_T=torch.arange(length), rows=0, extent=0, ragged=False,
                segments=[Segment(slot=0, start=0, length=length, offset=0)], dtype=self._embedding.dtype,
            )  # fmt: skip

        with torch.inference_mode():
            theirs_TV = self._model(
                input_ids=token_ids_T[None], position_ids=torch.arange(length)[None], use_cache=False,
                **{PLAN_ARGUMENT: plan()},
            ).logits[0]  # fmt: skip
            ours_TV = self.logits(token_ids_T, plan(), length)
            cache.clear_slot(0)
        return float((ours_TV - theirs_TV).abs().max() / theirs_TV.abs().max().clamp(min=1e-6))
