"""The parameters that a token goes through, against numbers worked out by hand from published configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from meshrl.models.experts import active_parameters, expert_layers
from tiny_families import FAMILIES, NEEDS_MORE, tiny_config

QWEN3_30B_A3B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL_8X7B = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS_20B = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


def without_storage(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def by_hand(family: str) -> int:
    """Attention, what a token goes through of the MLPs, and the head, of each layer without norms and biases."""
    if family == "qwen3_moe":
        attention = 2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048
        return 48 * (attention + 2048 * 128 + 8 * 3 * 2048 * 768) + 151936 * 2048
    if family == "mixtral":
        attention = 4096 * (32 + 2 * 8) * 128 + 4096 * 4096
        return 32 * (attention + 4096 * 8 + 2 * 3 * 4096 * 14336) + 32000 * 4096
    if family == "gpt_oss":
        attention = 2880 * (64 + 2 * 8) * 64 + 64 * 64 * 2880
        return 24 * (attention + 2880 * 32 + 4 * 3 * 2880 * 2880) + 201088 * 2880
    queries, keys = 7168 * 1536 + 1536 * 128 * 192, 7168 * (512 + 64) + 512 * 128 * 256
    attention = queries + keys + 128 * 128 * 7168
    dense, mixed = 3 * 7168 * 18432, 7168 * 256 + (8 + 1) * 3 * 7168 * 2048
    return 61 * attention + 3 * dense + 58 * mixed + 129280 * 7168


@pytest.mark.parametrize(
    ("family", "sizes", "billions"),
    [
        ("qwen3_moe", QWEN3_30B_A3B, 3.04),  # 3.35 with the input embedding, which multiplies nothing
        ("mixtral", MIXTRAL_8X7B, 12.75),
        ("gpt_oss", GPT_OSS_20B, 3.61),
        ("deepseek_v3", DEEPSEEK_V3, 36.6),
    ],
)
def test_published_models_are_counted_as_by_hand(family: str, sizes: dict[str, Any], billions: float) -> None:
    active = active_parameters(without_storage(CONFIG_MAPPING[family](**sizes)))
    assert active == pytest.approx(by_hand(family), rel=1e-3)
    assert active / 1e9 == pytest.approx(billions, abs=0.05)


def test_a_list_of_experts_counts_by_its_length() -> None:
    model = without_storage(tiny_config("qwen3_moe"))
    dense = active_parameters(model)
    for layer in model.model.layers:
        gate, down = layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj
        layer.mlp.experts = nn.ModuleList(nn.Module() for _ in gate)
        for expert, up, back in zip(layer.mlp.experts, gate, down, strict=True):
            expert.up, expert.down = nn.Parameter(up.detach()), nn.Parameter(back.detach())
    assert active_parameters(model) == dense


def test_frozen_parameters_and_the_input_embedding_are_left_out_and_a_tied_one_counts() -> None:
    model = without_storage(tiny_config("qwen3", tie_word_embeddings=False))
    embedding = model.get_input_embeddings().weight.numel()
    assert active_parameters(model) == sum(p.numel() for p in model.parameters()) - embedding
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert active_parameters(model, trainable_only=True) == model.lm_head.weight.numel()
    tied = without_storage(tiny_config("qwen3", tie_word_embeddings=True))
    assert active_parameters(tied) == sum(p.numel() for p in tied.parameters())


MIXTURES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "gpt_oss", "deepseek_v2", "glm4_moe", "minimax", "minimax_m2",
    "dots1", "olmoe", "phimoe", "granitemoe", "llama4_text", "aria_text", "dbrx", "ernie4_5_moe", "longcat_flash",
    "jetmoe", "lfm2_moe", "hunyuan_v1_moe", "nemotron_h", "jamba", "zaya",
)  # fmt: skip


@pytest.mark.parametrize("family", MIXTURES)
def test_a_tokens_share_of_the_experts_is_what_the_configuration_names(family: str) -> None:
    model = without_storage(tiny_config(family))
    layers = expert_layers(model, model.config)
    expected = {"zaya": {(4, 1)}}.get(family, {(4, 2)})
    if family == "longcat_flash":  # a fifth expert does nothing
        expected = {(5, 2)}
    assert {(experts.count, experts.per_token) for experts in layers} == expected


def test_every_family_of_mixtures_is_counted() -> None:
    """None raises: each that has experts names how many a token goes through."""
    for family in FAMILIES:
        if family in NEEDS_MORE:
            continue
        try:
            config = tiny_config(family)
            if not any(word in str(config.to_dict()) for word in ("expert", "moe")):
                continue
            model = without_storage(config)
        except Exception:  # noqa: BLE001 - families that this configuration does not make
            continue
        assert 0 < active_parameters(model) <= sum(p.numel() for p in model.parameters()), family
