"""Which tensors of an adapter are loaded together."""

from types import SimpleNamespace

import pytest

from meshrl.inference.vllm.adapter_parts import part_of, renames


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
