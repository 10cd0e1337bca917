"""The dtype that trainer and engines agree on where nobody sets one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from meshrl.core.config.shared import ModelConfig
from meshrl.models.load import ModelError, empty_model, eos_token_ids, resolve_device, resolve_dtype
from meshrl.training.build import build_learner
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup
from tiny_qwen3 import tiny_qwen3


@pytest.mark.parametrize(
    ("gpu", "checkpoint", "computed_in"),
    [
        (False, torch.float32, torch.float32),
        (False, torch.bfloat16, torch.float32),
        (True, torch.float32, torch.bfloat16),
        (True, torch.bfloat16, torch.bfloat16),
        (True, torch.float16, torch.float16),
        (True, None, torch.bfloat16),
    ],
)
def test_auto_is_float32_on_a_cpu_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, checkpoint: torch.dtype | None, computed_in: torch.dtype
) -> None:
    Qwen3Config(dtype=checkpoint).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert resolve_dtype(ModelConfig(name=str(tmp_path))) == computed_in


def test_a_dtype_that_is_set_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Qwen3Config(dtype=torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_dtype(ModelConfig(name=str(tmp_path), dtype="float32")) == torch.float32


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ModelError, match="'cuda:2' but the CUDA devices visible here are 0 to 1; use 'auto'"):
        resolve_device("cuda:2")


def test_a_checkpoint_in_float16_is_not_trained_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Qwen3Config(dtype=torch.float16).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        ModelError, match=r"is stored in float16, in which gradients underflow; set model\.dtype to bfloat16"
    ):
        build_learner(TrainerModelConfig(name=str(tmp_path)), parallel=RankGroup())


@pytest.mark.parametrize(
    ("given", "ids", "warning"),
    [
        ([7, 3], (7, 3), ""),
        (3, (3,), ""),
        ([3, 64], (3,), "eos_token_id [64] is left out: the model has 64 tokens"),
        (-1, (), "eos_token_id [-1] is left out"),
    ],
)
def test_tokens_that_end_a_completion_are_those_of_the_model(
    given: object, ids: tuple[int, ...], warning: str, warned: list[str]
) -> None:
    model = tiny_qwen3(0, vocab_size=64)
    model.generation_config.eos_token_id = given
    assert eos_token_ids(model) == ids
    assert (len(warned), warning in "".join(warned)) == (int(bool(warning)), True)


def test_a_token_id_in_words_is_refused() -> None:
    model = tiny_qwen3(0, vocab_size=64)
    model.generation_config.eos_token_id = "58"
    with pytest.raises(ModelError, match="eos_token_id of GenerationConfig must be token ids, got '58'"):
        eos_token_ids(model)


@pytest.mark.parametrize(
    "changed", [{"dtype": "auto"}, {"rope_parameters": {"rope_type": "twisted", "rope_theta": 1e4}}]
)
def test_a_configuration_of_no_model_is_a_sentence(tmp_path: Path, changed: dict[str, object]) -> None:
    Qwen3Config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ModelError, match=r"auto|twisted"):
        empty_model(ModelConfig(name=str(tmp_path), device="cpu"), dtype=torch.float32)
