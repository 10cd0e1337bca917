"""Tiny random models of every family that transformers lists for causal LMs, made from their configurations alone.

A configuration is made small by the names of its fields, its sub-configurations too; OVERRIDES holds what a family
needs beside that. Windows and chunks are 4 tokens, so that short sequences cross them. Weights are far from zero, so
that a token's logprob depends clearly on the tokens before it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshrl.models.state import ROUTER_BIASES

VOCAB = 64
WINDOW = 4
FAMILIES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NEEDS_MORE: Mapping[str, str] = {"gemma3n": "its vision part needs the timm package; its text part is gemma3n_text"}
"""Families that a configuration alone does not make here, and why."""

_HIDDEN, _HEADS, _KV_HEADS, _HEAD, _INNER, _LAYERS, _EXPERTS = 32, 4, 2, 8, 48, 2, 4
SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim"), _HIDDEN),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "embedding_dim", "input_embedding_size"), _HIDDEN),
    **dict.fromkeys(("output_embedding_size",), _HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_heads", "attention_heads", "mamba_n_heads"), _HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "mamba_num_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), _KV_HEADS),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "attention_head_size", "mamba_head_dim"), _HEAD),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim"), _INNER),
    **dict.fromkeys(("dim_ff", "d_inner", "n_inner", "feed_forward_size", "intermediate_size_mlp"), _INNER),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), _HEAD * 2
    ),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), _HEAD * 2),
    **dict.fromkeys(("prefix_dense_intermediate_size", "dense_intermediate_size"), _INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "zero_expert_num"), 1),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "moe_latent_size", "gated_norm_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), _HEAD),
    "mamba_d_head": 2 * _HEAD,
    "mamba_d_ssm": 2 * _HIDDEN,
    "v_head_dim": 2 * _HEAD,  # another size than that of the keys where a family has both
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 128),
    **dict.fromkeys(("max_target_positions",), 128),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("attention_window_size", "keep_window_size", "index_topk", "chunk_size"), WINDOW),
    **dict.fromkeys(("mamba_chunk_size", "index_block_size", "local_attn_chunk_length"), WINDOW),
    **dict.fromkeys(("lsh_attn_chunk_length", "block_size"), WINDOW),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "linear_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "indexer_head_dim", "swa_head_dim"), _HEAD),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads", "index_n_heads", "swa_num_attention_heads"), _HEADS),
    **dict.fromkeys(("linear_num_key_heads", "swa_num_key_value_heads"), _KV_HEADS),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 0),
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    **dict.fromkeys(("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(
        ("activation_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout"), 0.0
    ),
    **dict.fromkeys(("classifier_dropout", "layerdrop", "decoder_layerdrop", "resid_dropout", "embed_dropout"), 0.0),
    "residual_dropout": 0.0,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 3.0,
    "index_topk_blocks": 2,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "is_decoder": True,
}
_BOTH = ("sliding_attention", "full_attention")
_HYBRID = {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]}
_SHARED_KEYS = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [*_BOTH, *_BOTH]}
_INDEXED = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_budget": WINDOW, "indexer_compress_ratio": 1}
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]} for kind in _BOTH
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": _KV_HEADS, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": _INNER, "moe_num_experts": _EXPERTS, "moe_top_k": 2},
    },
    "gemma3n_text": {**_SHARED_KEYS, "activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hy_v4": {"index_n_heads": 16},  # with few heads many scores are 0, and which of them are taken is arbitrary
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "gemma4_text": _SHARED_KEYS,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "mamba2": {"head_dim": 2 * _HEAD},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 16)},
    "xmod": {"languages": ("en_XX",), "default_language": "en_XX"},
    "zamba": {
        **_HYBRID,
        "attention_hidden_size": 2 * _HIDDEN,
        "attention_head_dim": 2 * _HEAD,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", *["hybrid"] * 3],
    },
    "zamba2": {**_HYBRID, "num_mem_blocks": 1, "n_mamba_heads": _HEADS},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """The family's configuration with small numbers."""
    return _shrink(CONFIG_MAPPING[family], {**OVERRIDES.get(family, {}), **changes})


def _shrink(kind: type[PreTrainedConfig], overrides: Mapping[str, Any]) -> PreTrainedConfig:
    fields = {field.name for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {name: value for name, value in SMALL.items() if name in fields}
    if "kv_lora_rank" in fields:  # multi-head latent attention has no groups of query heads
        values["num_key_value_heads"] = _HEADS
    plain = kind()
    kinds = list(dict.fromkeys(getattr(plain, "layer_types", None) or ()))
    if "layer_types" in fields and kinds:
        layers = max(_LAYERS, len(kinds))
        values["layer_types"] = [kinds[index % len(kinds)] for index in range(layers)]
        values |= {name: layers for name in ("num_hidden_layers",) if name in fields}
    for name, sub in (kind.sub_configs or {}).items():
        own = getattr(plain, name, None)
        sub_kind = type(own) if isinstance(own, PreTrainedConfig) else sub
        if name in fields and sub_kind is not None and dataclasses.is_dataclass(sub_kind):
            values[name] = _shrink(sub_kind, overrides.get(name, {}))
    values |= {name: value for name, value in overrides.items() if name not in (kind.sub_configs or {})}
    return kind(**values)


def tiny_model(family: str, attn: str | None = "eager", **changes: Any) -> PreTrainedModel:
    """A random model of the family in float32 and eval mode; the same weights for the same changes."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            tiny_config(family, **changes), dtype=torch.float32, attn_implementation=attn
        )
    enlarge(model)
    return model.eval()


@torch.no_grad()
def enlarge(model: PreTrainedModel) -> None:
    """Weights so large that every part of the model moves the logits."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2 and "A_log" not in name:
            parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
        else:
            parameter.add_(noise * 0.1)
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in ROUTER_BIASES:
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
