"""Slots: each run's adapters are its own, of its own rank and layers, whatever else is mounted in between."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from meshrl.models.adapters import AdapterScale, AdapterSet, JoinedSets, mounted_set
from meshrl.models.lora import adapted_layers, make_set, prepare_lora, reset_lora
from tiny_families import tiny_model
from tiny_qwen3 import tiny_qwen3

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def prepared() -> Qwen3ForCausalLM:
    model = tiny_qwen3(intermediate_size=24, num_hidden_layers=2)
    prepare_lora(model, target_modules=["q_proj"])
    return model


def adapter_set(model: nn.Module, rank: int, targets: list[str], seed: int, experts: Sequence[str] = ()) -> AdapterSet:
    made = make_set(model, AdapterScale(rank=rank, alpha=8.0), target_modules=targets, target_parameters=experts)
    made.mount()
    reset_lora(model, seed)
    for layer in adapted_layers(model).values():
        nn.init.normal_(layer.lora_B, generator=torch.Generator().manual_seed(seed))
    return made


def apart(found: torch.Tensor, wanted: torch.Tensor | None) -> float:
    assert wanted is not None
    return float((found - wanted).detach().float().norm() / wanted.detach().float().norm().clamp(min=1e-30))


def output(model: nn.Module, of: AdapterSet) -> torch.Tensor:
    of.mount()
    result: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return result


def test_a_slot_computes_and_learns_as_if_it_were_alone() -> None:
    shared, alone = prepared(), prepared()
    small = adapter_set(shared, 3, ["q_proj", "down_proj"], seed=1)
    large = adapter_set(shared, 8, [], seed=2)
    single = adapter_set(alone, 3, ["q_proj", "down_proj"], seed=1)
    for made, model, first in ((small, shared, True), (large, shared, False), (single, alone, True)):
        made.open_gradient()
        result = output(model, made)
        torch.autograd.backward(result.square().sum() if first else result.sum())
    assert small.gradient is not None
    assert single.gradient is not None
    assert bool(small.gradient.any())
    assert torch.equal(small.gradient, single.gradient)
    assert torch.equal(small.flat, single.flat)
    assert torch.equal(output(shared, small), output(alone, single))
    assert not torch.equal(output(shared, large), output(shared, small))


@pytest.mark.parametrize(("grouped", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_slots_of_mixed_ranks_and_layers_share_a_row(grouped: bool, dtype: torch.dtype) -> None:
    model = tiny_qwen3(intermediate_size=24, num_hidden_layers=2).to(dtype)
    prepare_lora(model, target_modules=["q_proj"])
    sets = [
        adapter_set(model, 3, ["q_proj", "down_proj"], seed=1),
        adapter_set(model, 8, [], seed=2),
        adapter_set(model, 4, ["v_proj"], seed=3),
        adapter_set(model, 12, ["q_proj", "v_proj"], seed=4),
    ]
    lengths = [3, 0, 1, 4]
    most = 2e-2 if grouped else 1e-6
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj"):
        layer = model.get_submodule(name)
        inputs = torch.randn(1, 8, layer.in_features, generator=torch.Generator().manual_seed(5)).to(dtype)
        weights = torch.randn(1, 8, layer.out_features, generator=torch.Generator().manual_seed(6)).to(dtype)
        for each in sets:
            each.drop_gradient()
        with JoinedSets(sets, lengths, grouped=grouped) as joined:
            together = layer(inputs)
            torch.autograd.backward((together * weights).sum())
        joined.add_gradients()
        start = 0
        for each, length in zip(sets, lengths, strict=True):
            found = each.gradient
            each.drop_gradient()
            each.open_gradient()
            each.mount()
            here = slice(start, start := start + length)
            alone = layer(inputs[:, here])
            assert apart(together[:, here], alone) <= most
            if alone.requires_grad:
                torch.autograd.backward((alone * weights[:, here]).sum())
            assert found is not None or not length
            if found is not None:
                assert apart(found, each.gradient) <= most


def test_layers_outside_a_slot_compute_what_the_base_does() -> None:
    model = prepared()
    everywhere = adapter_set(model, 4, [], seed=1)
    one = adapter_set(model, 4, ["model.layers.1.self_attn.v_proj"], seed=2)
    assert list(adapted_layers(model)) == ["model.layers.1.self_attn.v_proj"]
    assert mounted_set(model) is one
    everywhere.mount()
    assert len(adapted_layers(model)) == 14
    assert mounted_set(model) is everywhere


def test_the_matrices_are_the_flat_tensor_and_the_gradients_the_flat_gradient() -> None:
    model = prepared()
    made = adapter_set(model, 3, ["q_proj"], seed=1)
    assert made.numel == 2 * (3 * 16 + 16 * 3)
    made.flat.zero_()
    assert not any(parameter.any() for pair in made.matrices.values() for parameter in pair)
    made.open_gradient()
    assert made.gradient is not None
    torch.autograd.backward(output(model, made).sum())
    made.gradient.fill_(2.0)
    assert all(bool((pair[0].grad == 2.0).all()) for pair in made.matrices.values() if pair[0].grad is not None)
    made.drop_gradient()
    assert all(parameter.grad is None for pair in made.matrices.values() for parameter in pair)


def test_experts_have_the_adapters_of_the_mounted_set_or_none() -> None:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model, base = tiny_model("qwen3_moe", attn=None), tiny_model("qwen3_moe", attn=None)
    prepare_lora(model, target_modules=[], target_parameters=targets)
    one = adapter_set(model, 8, ["q_proj"], seed=1, experts=targets)
    two = adapter_set(model, 16, ["q_proj"], seed=2, experts=targets)
    plain = adapter_set(model, 4, ["q_proj"], seed=3)
    first = output(model, one)
    assert not torch.equal(output(model, two), first)
    assert torch.equal(output(model, one), first)
    plain.flat.zero_()
    assert torch.equal(output(model, plain), base(input_ids=TOKENS, use_cache=False).logits)


def test_a_layer_that_was_not_prepared_is_refused_with_the_key_that_prepares_it() -> None:
    model = tiny_qwen3(tie_word_embeddings=False)
    prepare_lora(model, target_modules=[])
    with pytest.raises(ValueError, match=r"'lm_head' was not prepared .* name it in trainer\.model\.lora"):
        make_set(model, AdapterScale(rank=2, alpha=2.0), target_modules=["lm_head"])
