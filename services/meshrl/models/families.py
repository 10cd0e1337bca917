"""How each kind of model can be run, by the trainers and the embedded engine alike:

- packed: attention is ours, over packed rows in training and the cache's slots in the engine;
- plain: the model's own forward pass over whole sequences. The trainers pad rows for it, and the engine computes every
  sequence again for each token;
- refused, in one sentence that names the alternative.

A model type that rules over configurations and classes would misjudge is in a table.
`tests/contract/models/test_families.py` holds every family of transformers against its plain forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

PACKED_LAYERS = {"full_attention", "sliding_attention"}

UNPACKED_TYPES: Mapping[str, str] = {
    "doge": "a mask that depends on the values",
    "electra": "layers between the last hidden state and the output embeddings",
    "mllama_text_model": "a language model inside another",
    "minimax_m3_vl_text": "sparse attention",
    "modernbert-decoder": "layers between the last hidden state and the output embeddings",
    "moshi": "layers that do not hand arguments on to attention",
    "nemotron": "layers that do not hand arguments on to attention",
    "phimoe": "layers that do not tell attention their sliding window",
    "recurrent_gemma": "recurrent layers",
}
"""Why packed attention does not fit, though it seems to."""

_NOT_CAUSAL = "its logits at a token depend on later tokens"
_DRAFTS = "it drafts tokens for another model, of which it needs the hidden states"
_AUDIO = "it predicts codes of audio, not tokens of text"
REFUSED_TYPES: Mapping[str, str] = {
    "blt": "its patches of bytes are drawn by a second model",
    "cpmant": _NOT_CAUSAL,
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "musicgen": _AUDIO,
    "musicgen_melody": _AUDIO,
    "prophetnet": "it predicts several tokens at once",
    "reformer": _NOT_CAUSAL,
    "xlm": _NOT_CAUSAL,
    "xlnet": _NOT_CAUSAL,
}
"""Model types that are no causal language models of text here, and why."""

ENCODER_TYPES = frozenset(
    {
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
"""Model types that are causal only with `is_decoder` in their configuration."""

UNTRAINABLE_TYPES: Mapping[str, str] = {
    "phimoe": "its router draws experts at random in training, so that logprobs are not those of the sampler",
}
"""Model types that can be sampled but not trained, and why."""

_GROWING_POSITIONS = ("dynamic", "longrope")


def refusal(config: PreTrainedConfig) -> str | None:
    """Why such a model is neither trained nor served here, or None."""
    for each in _configs(config):
        if (reason := REFUSED_TYPES.get(each.model_type)) is not None:
            return reason
        if each.model_type in ENCODER_TYPES and not getattr(each, "is_decoder", False):
            return "its is_decoder is not set, so that its logits at a token depend on later tokens"
        if getattr(each, "use_bidirectional_attention", None) in (True, "all"):
            return "its use_bidirectional_attention is set, so that its logits at a token depend on later tokens"
    return None


def attention_implementation(config: PreTrainedConfig) -> str | None:
    """The one to load a model with: "eager" for capped scores, which SDPA drops. None: as transformers chooses."""
    capped = any(getattr(each, "attn_logit_softcapping", None) is not None for each in _configs(config))
    return "eager" if capped else None


def unpacked_reason(model: PreTrainedModel, max_len: int | None = None) -> str | None:
    """Why packed attention would not compute the same as the model's own, or None.

    With `max_len` for sequences of up to that many tokens, else within `positions_grow_beyond`.
    """
    config = model.config.get_text_config()
    strange = set(getattr(config, "layer_types", None) or ()) - PACKED_LAYERS
    limit = positions_grow_beyond(config)
    if strange:
        return f"it has layers of {', '.join(sorted(strange))}"
    if not (model._supports_attention_backend and model._can_set_attn_implementation()):
        return "its attention cannot be replaced"
    if config.model_type in UNPACKED_TYPES:
        return f"it has {UNPACKED_TYPES[config.model_type]}"
    head = model.get_output_embeddings()
    if not any(child is head for child in model.children()):
        return "it has layers between the last hidden state and the output embeddings"
    if max_len is not None and limit is not None and max_len > limit:
        return f"its rotary embeddings change for sequences of more than {limit} tokens"
    return None


def positions_grow_beyond(config: PreTrainedConfig) -> int | None:
    """The length beyond which a sequence's rotary embeddings depend on it. None if they never do."""
    rope = getattr(config, "rope_parameters", None) or {}
    limits = []
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if each.get("rope_type") in _GROWING_POSITIONS:
            original = each.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            limits.append(int(original or config.max_position_embeddings))
    return min(limits, default=None)


def learned_positions(model: PreTrainedModel) -> int | None:
    """The number of positions that have an embedding each. None if positions are computed."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        learned = isinstance(module, nn.Embedding) and ("pos" in name or "wpe" in name)
        if learned and limit is not None and 0 <= module.num_embeddings - limit <= 2:  # some begin to count at 2
            return int(limit)
    return None


def needs_unfused(model: PreTrainedModel) -> bool:
    """Whether attention has capped scores or sinks, which no fused kernel takes here."""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return capped or any(name.endswith("sinks") for name, _ in model.named_parameters())


def prefix_reason(model: PreTrainedModel) -> str | None:
    """Why samples of a packed row cannot share their beginning, or None; for models that run packed.

    Scores must depend on queries and keys alone, since attention to sample and prefix may be merged afterwards.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    if needs_unfused(model):
        return "its attention has capped scores or sinks"
    if "sliding_attention" in (layers or ()) or (not layers and getattr(config, "sliding_window", None)):
        return "its attention has sliding windows"
    if positions_grow_beyond(config) is not None:
        return "its rotary embeddings depend on the length of the sequence"
    if getattr(config, "attention_dropout", 0.0):
        return "its attention has dropout"
    if getattr(config, "v_head_dim", None) or getattr(config, "qk_rope_head_dim", None):
        return "its values have another size than its keys"
    return None


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    text = config.get_text_config()
    if text is not config:
        yield text
