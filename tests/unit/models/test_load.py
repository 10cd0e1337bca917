"""The dtype that trainer and engines agree on where nobody sets one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from meshrl.core.config.shared import ModelConfig
from meshrl.models.load import ModelError, resolve_device, resolve_dtype


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
