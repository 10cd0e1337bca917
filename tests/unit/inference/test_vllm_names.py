"""Models whose layers vLLM knows under other names than versions carry are refused before vLLM starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.core.config.shared import ModelConfig, WeightBroadcastConfig
from meshrl.inference.config import InferenceConfig
from meshrl.inference.vllm.build import describe
from meshrl.inference.vllm.installed import VllmError
from meshrl.models.load import ModelError
from meshrl.versions.layout import Layout
from tiny_families import tiny_model


def config(folder: Path, family: str, **changes: Any) -> InferenceConfig:
    tiny_model(family, None).save_pretrained(folder)
    return InferenceConfig(model=ModelConfig(name=str(folder), device="cpu"), **changes)


def described(served: InferenceConfig) -> Layout:
    return describe(served.model, torch.bfloat16, versions=served.takes_whole_versions)[0]


VERSIONS = {"weight_broadcast": WeightBroadcastConfig(address="localhost:1")}


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2"])
def test_versions_under_names_that_vllm_does_not_know_are_refused(family: str, tmp_path: Path) -> None:
    wanted = rf"\(of type '{family}'\): they carry model\.layers\.0\.mlp\..*knows as .*block_sparse_moe.*'embedded'$"
    with pytest.raises(VllmError, match=wanted):
        described(config(tmp_path, family, **VERSIONS))


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
