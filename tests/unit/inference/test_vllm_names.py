"""Names of a version's tensors at vLLM, and of the parameters that it reports as loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshrl.core.config.shared import ModelConfig, WeightBroadcastConfig
from meshrl.inference.config import InferenceConfig
from meshrl.inference.vllm import installed
from meshrl.inference.vllm.build import describe
from meshrl.inference.vllm.installed import VllmError, without_weights
from meshrl.models.folder import as_in_files, renamed_in_layers
from meshrl.models.load import ModelError, empty_model
from meshrl.models.state import hf_state
from meshrl.versions.layout import Layout, layout_of
from tiny_families import tiny_model


def config(
    folder: Path, family: str, over: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> InferenceConfig:
    tiny_model(family, None, **over).save_pretrained(folder)
    return InferenceConfig(model=ModelConfig(name=str(folder), device="cpu"), **changes)


def described(served: InferenceConfig) -> Layout:
    model, _ = describe(
        served.model, torch.bfloat16, max_model_len=served.max_model_len, as_trainers=served.loads_as_trainers
    )
    return layout_of(hf_state(model))


@pytest.mark.parametrize(("max_model_len", "differ"), [(8, False), (9, True)])
def test_positions_that_are_not_the_trainers_are_told(
    tmp_path: Path, max_model_len: int, differ: bool, warned: list[str]
) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0]}
    over = {"rope_parameters": rope | factors, "original_max_position_embeddings": 8}
    described(config(tmp_path, "phi3", over, max_model_len=max_model_len))
    assert any("inference.max_model_len to 8" in line for line in warned) is differ


VERSIONS = {"weight_broadcast": WeightBroadcastConfig(address="localhost:1")}


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2"])
def test_versions_come_under_the_names_of_files_where_those_differ_in_layers(family: str, tmp_path: Path) -> None:
    """vLLM knows the names of files. The experts of a layer are then parts of the version's own memory."""
    model = tiny_model(family, None)
    model.save_pretrained(tmp_path)
    outline = empty_model(ModelConfig(name=str(tmp_path), device="cpu"), dtype=torch.float32)
    assert renamed_in_layers(outline)
    assert not renamed_in_layers(tiny_model("qwen3_moe", None))
    stored = load_file(tmp_path / "model.safetensors")
    version = hf_state(model)
    assert version.keys() != stored.keys()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in version.items():  # portions may end anywhere between two tensors
        found |= as_in_files(outline, {name: tensor})
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())


def test_what_got_no_weights_is_named_whatever_a_release_reports() -> None:
    """vLLM 0.26 leaves `routed_experts` out of the names that it reports, 0.32 does not."""
    experts = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    parameters = [experts, "model.norm.weight", "model.layers.0.self_attn.o_proj.base_layer.weight"]
    others = ["model.norm.weight", "model.layers.0.self_attn.o_proj.weight"]
    assert without_weights(parameters, ["model.layers.0.mlp.experts.w13_weight", *others]) == []
    assert without_weights(parameters, [experts, *others]) == []
    assert without_weights(parameters, others) == [experts]


def test_what_reads_no_whole_versions_is_served(tmp_path: Path) -> None:
    layout = described(config(tmp_path, "mixtral"))
    assert any("mlp.experts" in entry[0] for entry in layout)
    described(config(tmp_path, "mixtral", lora_rank=8, **VERSIONS))


def test_a_folder_that_the_trainers_would_read_otherwise_is_refused(tmp_path: Path) -> None:
    served = config(tmp_path, "llama", **VERSIONS)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, "tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"config\.json ties lm_head\.weight to model\.embed_tokens\.weight"):
        described(served)
    described(served.model_copy(update={"weight_broadcast": None}))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "gemma3", "qwen3_5_text"])
def test_versions_that_vllm_takes(family: str, tmp_path: Path) -> None:
    described(config(tmp_path, family, **VERSIONS))


def test_a_function_that_is_replaced_and_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would go on by another way, and our processes would come up as if nothing had been asked for."""
    there = SimpleNamespace(get_mp_context=lambda: None)
    gone = ModuleType("vllm.v1.executor.multiproc_executor")
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", SimpleNamespace(coordinator=there, utils=there))
    monkeypatch.setitem(sys.modules, "vllm.v1.executor", SimpleNamespace(multiproc_executor=gone))
    monkeypatch.setattr(installed, "version", lambda: (0, 31))
    with pytest.raises(VllmError, match=r"multiproc_executor of vLLM 0\.31 has no get_mp_context.*install vLLM 0\.26"):
        installed.start_processes_by(SimpleNamespace())  # type: ignore[arg-type]  # nothing is started
    assert not hasattr(gone, "get_mp_context")
