"""Which tensors of an adapter are loaded together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshrl.inference.vllm.adapters import part_of, renames
from meshrl.inference.vllm.arguments import layers_beside_experts


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight", "base_model.model.model.layers.3.self_attn"),
        ("base_model.model.model.layers.3.self_attn.v_proj.lora_B.weight", "base_model.model.model.layers.3.self_attn"),
        ("base_model.model.model.layers.3.mlp.gate_proj.lora_A.weight", "base_model.model.model.layers.3.mlp"),
        ("base_model.model.lm_head.lora_A.weight", ""),
    ],
)
def test_a_part_has_the_matrices_that_vllm_packs_together(name: str, part: str) -> None:
    assert part_of(name) == part


@pytest.mark.parametrize("method", ["get_rename_mapper", "get_unstacked_mapper"])
def test_layers_that_vllm_packs_keep_their_names_in_each_release(method: str) -> None:
    assert renames(SimpleNamespace(**{method: lambda: "without packed layers"})) == "without packed layers"
    assert renames(None) is None


ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
MLA = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]
MLP = ["down_proj", "gate_proj", "up_proj"]


@pytest.mark.parametrize(
    ("family", "keys", "layers"),
    [
        ("qwen3", {}, None),
        ("qwen3_moe", {"num_experts": 4}, ATTENTION),
        ("qwen3_moe", {"num_experts": 4, "mlp_only_layers": [0]}, sorted([*ATTENTION, *MLP])),
        ("deepseek_v3", {"n_routed_experts": 8, "first_k_dense_replace": 1}, sorted([*MLA, *MLP])),  # shared experts
    ],
)
def test_vllm_adapts_no_experts(family: str, keys: dict[str, Any], layers: list[str] | None) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=2, vocab_size=64, **keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert layers_beside_experts(model) == layers
