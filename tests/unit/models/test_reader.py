"""A rank reads its own part of a folder: rows of a tensor that is stored as it is, and no expert that it has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from meshrl.core.config.shared import ModelConfig
from meshrl.models.folder import ModelFolder, WeightReader
from meshrl.models.load import empty_model
from tiny_families import tiny_model


class Recorded(dict[str, Any]):
    """Tensors of a folder that remember which of them were read, and what part."""

    def __init__(self, tensors: Any, read: dict[str, object]) -> None:
        super().__init__({name: _Tensor(name, tensor, read) for name, tensor in tensors.items()})


class _Tensor:
    def __init__(self, name: str, tensor: Any, read: dict[str, object]) -> None:
        self._name, self._tensor, self._read = name, tensor, read

    def get_shape(self) -> Any:
        return self._tensor.get_shape()

    def __getitem__(self, part: Any) -> torch.Tensor:
        self._read[self._name] = part
        found: torch.Tensor = self._tensor[part]
        return found


def reader(path: Path, read: dict[str, object], *, dtype: torch.dtype) -> WeightReader:
    folder = ModelFolder("given", path)
    folder.__dict__["tensors"] = Recorded(folder.tensors, read)
    return WeightReader(folder, empty_model(ModelConfig(name=str(path), device="cpu"), dtype=dtype))


def test_only_the_part_that_is_asked_for_is_read(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", None).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    rows = (slice(2, 5), slice(None))
    wanted = {
        "lm_head.weight": rows,
        "model.layers.1.mlp.experts.gate_up_proj": (slice(1, 2), slice(None), slice(3, 9)),
        "model.norm.weight": ...,
    }
    read: dict[str, object] = {}
    weights = reader(tmp_path, read, dtype=torch.float32)
    assert read == {}, "names and shapes alone are enough to compare a folder with a model"
    found = dict(weights.read(wanted.get))
    assert found.keys() == wanted.keys()
    for name, part in wanted.items():
        assert torch.equal(found[name], plain[name][part]), name
    assert read.pop("lm_head.weight") == rows
    assert read.pop("model.norm.weight") is ...
    assert all(name.startswith("model.layers.1.mlp.experts.") and "down_proj" not in name for name in read)


def test_tensors_are_joined_in_the_dtype_of_the_model_and_one_at_a_time(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", None).bfloat16().save_pretrained(tmp_path)
    read: dict[str, object] = {}
    for name, tensor in reader(tmp_path, read, dtype=torch.bfloat16).read():
        assert tensor.dtype == torch.bfloat16, name
        assert len({key.split(".experts.")[0] for key in read}) == 1, "layers are read one after another"
        read.clear()
