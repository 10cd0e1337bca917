"""Adapters of linear layers: merged or brought back from files they compute the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3ForCausalLM

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.algorithms.objective import Objective
from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.core.config.shared import ModelConfig
from meshrl.models.adapters import AdapterScale, AdapterSet
from meshrl.models.load import fill_model
from meshrl.models.logprobs import PackedPolicy
from meshrl.models.lora import (
    LoraLinear,
    adapted_layers,
    adapter_config,
    adapter_state,
    coverage,
    is_adapter,
    make_set,
    prepare_lora,
    reset_lora,
    save_adapter,
)
from meshrl.models.state import gather_state, hf_state
from meshrl.training.config import OptimConfig
from meshrl.training.learner import Learner, to_row
from meshrl.wire.types import MicroBatch
from tiny_families import tiny_model
from tiny_qwen3 import tiny_qwen3
from trained import Trained, apply_lora

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
TARGETS = ["q_proj", "down_proj"]


def build(*, tied: bool = True, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    return tiny_qwen3(intermediate_size=24, num_hidden_layers=2, tie_word_embeddings=tied).to(dtype)


def adapted(
    *, tied: bool = True, targets: list[str] = TARGETS, dropout: float = 0.0, trained: bool = True, seed: int = 1
) -> Qwen3ForCausalLM:
    model = build(tied=tied)
    apply_lora(model, rank=4, alpha=6.0, dropout=dropout, target_modules=targets)
    reset_lora(model, seed)
    if trained:
        source = torch.Generator().manual_seed(seed)
        for layer in adapted_layers(model).values():
            nn.init.normal_(layer.lora_B, generator=source)
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    result: torch.Tensor = model(TOKENS).logits
    return result if model.training else result.detach()


def rows() -> tuple[MicroBatch, ...]:
    source = np.random.default_rng(0)
    samples = [
        TrainSample(
            token_ids=source.integers(0, 16, length).astype(np.int32),
            loss_mask=np.arange(length) >= 1,
            logprobs=np.zeros(length, np.float32),
            advantage=0.0,
        )
        for length in (5, 9, 7)
    ]
    return pack_samples(samples, seq_len=32, dp_size=1).micro_batches


def empty() -> Qwen3ForCausalLM:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(build(tied=False).config)
    prepare_lora(model, target_modules=TARGETS)
    return model


def mount(model: nn.Module) -> None:
    make_set(model, AdapterScale(rank=4, alpha=6.0), target_modules=TARGETS).mount()
    reset_lora(model, 0)


def test_output_is_the_base_plus_the_scaled_product() -> None:
    base = nn.Linear(5, 3)
    layer = LoraLinear(base)
    AdapterSet({"": layer}, {"": layer}, AdapterScale(rank=2, alpha=3.0), device=torch.device("cpu")).mount()
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    inputs = torch.randn(7, 5)
    expected = inputs @ base.weight.T + base.bias + 1.5 * inputs @ layer.lora_A.T @ layer.lora_B.T
    torch.testing.assert_close(layer(inputs), expected)


def test_base_parameters_keep_their_names_and_adapters_are_float32() -> None:
    model = build(dtype=torch.bfloat16)
    names = list(dict(model.named_parameters()))
    apply_lora(model, rank=4, alpha=6.0, dropout=0.0, target_modules=TARGETS)
    assert [name for name, _ in model.named_parameters() if not is_adapter(name)] == names
    dtypes = {is_adapter(name): parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_compute_what_the_adapters_do(tied: bool) -> None:
    targets = TARGETS if tied else [*TARGETS, "lm_head"]
    model, plain = adapted(tied=tied, targets=targets), build(tied=tied).eval()
    merged = gather_state(model)
    assert merged.keys() == hf_state(plain).keys()
    changed = {name for name, tensor in hf_state(plain).items() if not torch.equal(tensor, merged[name])}
    assert changed == {f"{name}.weight" for name in adapted_layers(model)}
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-5, rtol=1e-5)


def test_merging_rounds_once() -> None:
    model = adapted()
    for layer in adapted_layers(model).values():
        layer.weight.data = layer.weight.data.bfloat16()
    merged = hf_state(model, torch.bfloat16)
    for name, layer in adapted_layers(model).items():
        exact = layer.weight.double() + 1.5 * layer.lora_B.double() @ layer.lora_A.double()
        assert torch.equal(merged[f"{name}.weight"], exact.float().bfloat16())
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}


@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_follows_float32(autocast: bool) -> None:
    model, exact = adapted(), logits(adapted())
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            half = logits(model)
    else:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data if is_adapter(name) else parameter.data.bfloat16()
        half = logits(model)
    assert half.dtype == torch.bfloat16
    assert float((half.float() - exact).abs().max()) < 0.05 * float(exact.abs().max())


@torch.no_grad()
def test_dropout_spares_the_base_and_evaluation() -> None:
    layer = LoraLinear(nn.Linear(400, 2))
    scale = AdapterScale(rank=1, alpha=1.0, dropout=0.25)
    AdapterSet({"": layer}, {"": layer}, scale, device=torch.device("cpu")).mount()
    nn.init.ones_(layer.lora_A)
    nn.init.ones_(layer.lora_B)
    inputs = torch.ones(50, 400)
    base = nn.functional.linear(inputs, layer.weight, layer.bias)
    kept = (layer(inputs) - base)[:, 0] * 0.75  # inputs that are kept are scaled by 1 / (1 - dropout)
    assert len(set(kept.round().tolist())) > 5
    assert float(kept.mean()) == pytest.approx(300, rel=0.02)
    torch.testing.assert_close(layer.eval()(inputs) - base, torch.full((50, 2), 400.0))


@torch.no_grad()
def test_first_values_depend_on_the_seed_alone_and_have_the_published_bound() -> None:
    one, same, other = adapted(trained=False), adapted(trained=False), adapted(trained=False, seed=2)
    for name, layer in adapted_layers(one).items():
        bound = 1 / math.sqrt(layer.in_features)
        assert 0.8 * bound < float(layer.lora_A.abs().max()) <= bound
        assert torch.equal(layer.lora_A, adapted_layers(same)[name].lora_A)
        assert not torch.equal(layer.lora_A, adapted_layers(other)[name].lora_A)
        assert not layer.lora_B.any()
    first, second = list(adapted_layers(one).values())[:2]
    assert not torch.equal(first.lora_A[:, :8], second.lora_A[:, :8])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "wo"], r"'wo' names no linear layer; this model has down_proj, gate_proj, k_proj, lm_head, o_proj"),
        (["embed_tokens"], "'embed_tokens' names no linear layer"),
        (["q_proj", "lm_head"], r"'lm_head' shares its weight with 'model\.embed_tokens\.weight'.*leave it out"),
    ],
)
def test_target_that_cannot_be_adapted_is_refused_and_changes_nothing(targets: list[str], message: str) -> None:
    model = build(tied=True)
    with pytest.raises(ValueError, match=message):
        apply_lora(model, rank=4, alpha=6.0, dropout=0.0, target_modules=targets)
    assert not adapted_layers(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
LINEAR_ATTENTION = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}


@pytest.mark.parametrize(
    ("family", "targets", "without"),
    [
        ("llama", SEVEN, "lm_head"),
        ("qwen3_5_text", SEVEN | LINEAR_ATTENTION, "lm_head"),
        ("gpt_oss", SEVEN - {"gate_proj", "up_proj", "down_proj"}, "lm_head, experts.down_proj (all experts in one), "),
        (
            "qwen3_moe",
            SEVEN - {"gate_proj", "up_proj", "down_proj"},
            "lm_head, experts.down_proj (all experts in one), ",
        ),
        ("qwen2_moe", SEVEN, "lm_head, mlp.shared_expert_gate, experts.down_proj (all experts in one), "),
        ("gemma3", SEVEN, "fc1, "),
    ],
)
def test_by_default_every_linear_layer_of_the_blocks_has_an_adapter(
    family: str, targets: set[str], without: str
) -> None:
    model = tiny_model(family, None)
    chosen = apply_lora(model, rank=2, alpha=2.0, dropout=0.0, target_modules=[])
    assert {name.rpartition(".")[2] for name in chosen} == targets
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    line = coverage(model)
    assert line.startswith(f"adapters on {len(chosen)} of {linear} linear layers; without: ")
    assert without in line


def test_experts_that_are_named_are_refused_with_the_tensor_that_holds_them() -> None:
    model = tiny_model("mixtral", None)
    with pytest.raises(
        ValueError, match=r"'w1' names no linear layer; .* and model\.layers\.0\.mlp\.experts\..* is of all"
    ):
        apply_lora(model, rank=2, alpha=2.0, dropout=0.0, target_modules=["q_proj", "w1"])


def test_files_have_the_names_and_the_configuration_that_peft_reads(tmp_path: Path) -> None:
    model = adapted(targets=["q_proj", "model.layers.1.mlp.up_proj"])
    save_adapter(tmp_path, adapter_state(model), adapter_config(model, "org/base"))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers"
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        f"{prefix}.0.self_attn.q_proj.lora_A.weight": (4, 16),
        f"{prefix}.0.self_attn.q_proj.lora_B.weight": (16, 4),
        f"{prefix}.1.self_attn.q_proj.lora_A.weight": (4, 16),
        f"{prefix}.1.self_attn.q_proj.lora_B.weight": (16, 4),
        f"{prefix}.1.mlp.up_proj.lora_A.weight": (4, 16),
        f"{prefix}.1.mlp.up_proj.lora_B.weight": (24, 4),
    }
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for name, layer in adapted_layers(model).items():
        for part in ("lora_A", "lora_B"):
            assert torch.equal(tensors[f"base_model.model.{name}.{part}.weight"], getattr(layer, part))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.mlp.up_proj", "q_proj"]
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6.0, "bias": "none"}
    assert {key: config[key] for key in expected} == expected
    assert config["base_model_name_or_path"] == "org/base"


def with_whole(modules: list[str], *, tied: bool = False) -> Qwen3ForCausalLM:
    model = build(tied=tied, dtype=torch.bfloat16)
    apply_lora(model, rank=4, alpha=6.0, dropout=0.0, target_modules=TARGETS, modules_to_save=modules)
    reset_lora(model, 1)
    return model


def test_modules_beside_the_adapters_are_trained_whole_and_kept_in_the_folder_as_peft_has_them(tmp_path: Path) -> None:
    model = with_whole(["lm_head", "model.norm"])
    whole = ["model.norm.weight", "lm_head.weight"]
    assert coverage(model).endswith(f"trained whole: {', '.join(whole)}")
    assert {model.get_parameter(name).dtype for name in whole} == {torch.float32}
    before = {name: tensor.clone() for name, tensor in hf_state(model).items()}
    trained = Trained.by(
        Learner(PackedPolicy(model, compute_dtype=torch.bfloat16)), Objective(loss=cross_entropy_loss),
        OptimConfig(lr=1e-2),
    )  # fmt: skip
    losses = [trained.step(rows()).loss for _ in range(4)]
    assert losses[-1] < losses[0]
    adapted_names = {f"{name}.weight" for name in adapted_layers(model)}
    changed = {name for name, tensor in hf_state(model).items() if not torch.equal(tensor, before[name])}
    assert changed == {*whole, *adapted_names}
    save_adapter(tmp_path, adapter_state(model), adapter_config(model, "base"))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["lm_head", "model.norm"]
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.equal(stored[f"base_model.model.{name}"], model.get_parameter(name)) for name in whole)


@pytest.mark.parametrize(
    ("tied", "modules", "message"),
    [
        (True, ["lm_head"], r"lm_head\.weight is model\.embed_tokens\.weight as well.*leave it out"),
        (False, ["mlp"], r"mlp\.down_proj\.weight has an adapter, by model\.lora\.target_modules"),
        (False, ["score"], "'score' names no module"),
    ],
)
def test_modules_that_cannot_be_trained_whole_are_refused(tied: bool, modules: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_whole(modules, tied=tied)


def test_only_ranks_that_ask_keep_the_state() -> None:
    model = adapted()
    assert adapter_state(model, keep=False) == {}
    state = adapter_state(model)
    assert len(state) == 8
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == 1  # one copy, however many layers
    for tensor in state.values():
        tensor.zero_()
    assert all(layer.lora_A.any() for layer in adapted_layers(model).values())


def test_checkpoint_fills_an_adapted_model_that_had_no_storage(tmp_path: Path) -> None:
    base = build(tied=False).eval()
    base.save_pretrained(tmp_path)
    model = empty().to_empty(device="cpu").eval()
    fill_model(model, ModelConfig(name=str(tmp_path), device="cpu"))
    mount(model)
    assert torch.equal(logits(model), logits(base))


def test_random_weights_fill_an_adapted_model_that_had_no_storage() -> None:
    model = empty().to_empty(device="cpu").eval()
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    model.initialize_weights()
    mount(model)
    assert bool(logits(model).isfinite().all())
    assert float(adapted_layers(model)["model.layers.0.self_attn.q_proj"].weight.detach().std()) > 0


@pytest.mark.parametrize("max_logits_bytes", [1 << 20, 5 * 16 * 4])
def test_policy_with_an_adapted_head_follows_the_merged_one(max_logits_bytes: int) -> None:
    model, plain = adapted(tied=False, targets=["q_proj", "lm_head"]), build(tied=False).eval()
    plain.load_state_dict(gather_state(model), strict=False)
    (micro_batch,) = rows()
    row = to_row(micro_batch, torch.device("cpu"))
    logprobs, entropies = PackedPolicy(model, max_logits_bytes=max_logits_bytes)(row)
    expected, expected_entropies = PackedPolicy(plain)(row)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies, expected_entropies, atol=1e-5, rtol=0)
    torch.autograd.backward(-logprobs.sum())
    torch.autograd.backward(-expected.sum())
    head, merged = adapted_layers(model)["lm_head"], plain.lm_head.weight.grad
    assert head.weight.grad is None
    assert head.lora_B.grad is not None
    assert merged is not None
    torch.testing.assert_close(head.lora_B.grad, 1.5 * merged @ head.lora_A.T, atol=1e-4, rtol=1e-4)
