"""Adapters on experts and linear layers: nothing changes at first, only they learn, and merging keeps what they do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from inference_kit import ask, complete, full_forward
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.embedded.low_rank import AdapterLayers
from meshrl.inference.engine import HostVersion
from meshrl.models.expert_lora import ExpertAdapter
from meshrl.models.lora import (
    adapted_layers,
    adapter_config,
    adapter_state,
    coverage,
    is_adapter,
    peft_state,
    reset_lora,
    save_adapter,
)
from meshrl.models.state import hf_state, stored_tensors
from meshrl.versions import peft
from meshrl.wire.errors import MeshError
from tiny_families import tiny_model
from trained import apply_lora

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "nemotron_h"]
"""gpt_oss has biases, interleaved gates and transposed weights, nemotron_h experts without a gate."""


def targets_of(model: PreTrainedModel) -> list[str]:
    """By the last parts of their names, as a user writes them."""
    joined = [name for name, each in model.named_parameters() if each.ndim == 3 and "experts." in name]
    return sorted({".".join(name.split(".")[-3:]) for name in joined})


def adapted(family: str, *, trained: bool = True, seed: int = 1) -> PreTrainedModel:
    model = tiny_model(family, attn=None)
    apply_lora(model, rank=8, alpha=12.0, dropout=0.0, target_modules=[], target_parameters=targets_of(model))
    reset_lora(model, seed)
    if trained:
        source = torch.Generator().manual_seed(seed)
        for layer in adapted_layers(model).values():
            nn.init.normal_(layer.lora_B, std=0.2, generator=source)
    return model.eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def merged(family: str, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    plain = tiny_model(family, attn=None)
    for name, tensor in stored_tensors(plain).items():
        tensor.copy_(state[name])
    return plain


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_change_nothing_at_first_and_then_what_merging_changes(family: str) -> None:
    model, plain = adapted(family, trained=False), tiny_model(family, attn=None)
    assert any(isinstance(layer, ExpertAdapter) for layer in adapted_layers(model).values())
    assert torch.equal(logits(model), logits(plain))
    model = adapted(family)
    torch.testing.assert_close(logits(merged(family, hf_state(model))), logits(model), atol=2e-4, rtol=1e-3)
    assert not torch.allclose(logits(model), logits(plain), atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_adapters_get_a_gradient_and_it_is_that_of_the_merged_weight(family: str) -> None:
    model = adapted(family)
    model(input_ids=IDS, use_cache=False).logits.square().sum().backward()
    adapters = {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert {name for name, each in model.named_parameters() if each.grad is not None} == adapters
    assert {name for name, each in model.named_parameters() if each.requires_grad} == adapters
    plain = merged(family, hf_state(model))
    plain(input_ids=IDS, use_cache=False).logits.square().sum().backward()
    weights = dict(plain.named_parameters())
    for name, layer in adapted_layers(model).items():
        if isinstance(layer, ExpertAdapter):
            grad = weights[name].grad
            assert grad is not None
            whole = grad.transpose(1, 2) if layer.transposed else grad
            expected = layer.scale * torch.bmm(whole, layer.lora_A.transpose(1, 2))
            torch.testing.assert_close(layer.lora_B.grad, expected.detach(), atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_in_pefts_form_holds_the_adapters(family: str, tmp_path: Path) -> None:
    model = adapted(family)
    save_adapter(tmp_path, adapter_state(model), adapter_config(model, "base"))
    table, tensors = peft.read_folder(tmp_path)
    assert sorted(table["target_parameters"]) == targets_of(tiny_model(family, attn=None))
    assert any(name.endswith("experts.base_layer.lora_A.weight") for name in tensors)
    for name, layer in adapted_layers(model).items():
        if isinstance(layer, ExpertAdapter):
            for part, matrix in (("A", layer.lora_A), ("B", layer.lora_B)):
                stored = tensors[peft.tensor_name(peft.wrapper_of(name), part)]
                assert torch.equal(peft.read_experts(stored, layer.count, part), matrix)


def test_all_names_the_experts_of_a_mixture_and_nothing_of_a_dense_model() -> None:
    found = {}
    for family in ("qwen3_moe", "qwen3"):
        model = tiny_model(family, attn=None)
        layers = apply_lora(model, rank=8, alpha=1.0, dropout=0.0, target_modules=[], target_parameters=["all"])
        found[family] = [name for name, layer in layers.items() if isinstance(layer, ExpertAdapter)]
    joined = [name for name, each in tiny_model("qwen3_moe", attn=None).named_parameters() if each.ndim == 3]
    assert found == {"qwen3_moe": joined, "qwen3": []}


def host_version(model: PreTrainedModel, run: str = "run") -> HostVersion:
    config = peft.config_of(adapter_config(model, "base"))
    return HostVersion(run_id=run, version=1, tensors=peft_state(adapter_state(model)), adapter=config)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_merges_to_the_bit_what_the_trainer_merges(family: str) -> None:
    model = adapted(family)
    layers = AdapterLayers(tiny_model(family, attn=None), torch.device("cpu"))
    found = layers.prepare(host_version(model), 1).experts
    own = hf_state(model)
    assert any(name.endswith("down_proj") for name in found)
    for name, tensor in found.items():
        assert torch.equal(tensor, own[name]), name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
async def test_an_engine_has_the_experts_of_each_requests_own_run(family: str) -> None:
    engine = EmbeddedEngine(tiny_model(family, attn=None), max_model_len=32, num_slots=4, seed=0)
    engine.start()
    runs = {name: adapted(family, seed=seed) for seed, name in enumerate("ab", 1)}
    for name, model in runs.items():
        await engine.stage(host_version(model, name))
        engine.adapters.serve(name, 1)
    prompt = [3, 1, 4, 1, 5]
    asked = [replace(ask(prompt), policy=name) for name in runs]
    made = await asyncio.gather(*(complete(engine, request) for request in asked))
    await engine.close()
    for model, chunk in zip(runs.values(), made, strict=True):
        forward = full_forward(model, prompt, chunk.token_ids.tolist())
        torch.testing.assert_close(torch.from_numpy(chunk.logprobs), torch.from_numpy(forward), atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_peft_itself_computes_the_same(family: str, tmp_path: Path) -> None:
    from peft import PeftModel  # two seconds, which each worker would pay at collection

    model = adapted(family)
    save_adapter(tmp_path, adapter_state(model), adapter_config(model, "base"))
    loaded = PeftModel.from_pretrained(tiny_model(family, attn=None), str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=IDS, use_cache=False).logits, logits(model), atol=2e-4, rtol=1e-3)


def test_every_tensor_of_an_adapter_must_change_a_weight() -> None:
    model = adapted("qwen3_moe")
    state, config = peft_state(adapter_state(model)), peft.config_of(adapter_config(model, "base"))
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(tiny_model("qwen3_moe")).items()}
    name = next(name for name in state if "experts.base_layer.lora_B" in name)
    with pytest.raises(MeshError, match="is for a layer that the model does not have"):
        peft.check_fit(1, config, {**state, name.replace("layers.0", "layers.7"): state[name]}, shapes)
    with pytest.raises(MeshError, match="has only one of lora_A and lora_B"):
        peft.check_fit(1, config, {key: each for key, each in state.items() if key != name}, shapes)
    with pytest.raises(MeshError, match="for rank 8, got"):
        peft.check_fit(1, config, {**state, name: state[name][1:]}, shapes)


@pytest.mark.parametrize(
    ("family", "targets", "why"),
    [
        ("qwen3_moe", ["experts.w1"], "names no experts' parameter; this model has mlp.experts.down_proj"),
        ("qwen3_moe", TARGETS[:1], "name both"),
        ("qwen3", TARGETS, "this model has none"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(family: str, targets: list[str], why: str) -> None:
    model = tiny_model(family, attn=None)
    before = {name: each.requires_grad for name, each in model.named_parameters()}
    with pytest.raises(ValueError, match=why):
        apply_lora(model, rank=8, alpha=1.0, dropout=0.0, target_modules=[], target_parameters=targets)
    assert {name: each.requires_grad for name, each in model.named_parameters()} == before


def test_a_rank_that_grouped_products_refuse_is_refused_and_no_adapter_mounted() -> None:
    model = tiny_model("qwen3_moe", attn=None)
    with pytest.raises(ValueError, match="need a multiple of 8; take 8"):
        apply_lora(model, rank=4, alpha=1.0, dropout=0.0, target_modules=[], target_parameters=TARGETS)
    assert not adapted_layers(model)
    assert torch.equal(logits(model), logits(tiny_model("qwen3_moe", attn=None)))


def test_the_log_counts_what_is_adapted_and_names_what_is_not() -> None:
    assert "and 4 parameters of experts; without" in coverage(adapted("qwen3_moe"))
    assert "experts" not in coverage(adapted("qwen3_moe")).partition("without")[2]
