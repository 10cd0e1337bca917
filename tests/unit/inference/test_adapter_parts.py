"""Which tensors of an adapter are loaded together."""

import pytest

from meshrl.inference.vllm.adapter_parts import part_of


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
