"""The PEFT layout: names, the two files and what fits a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshrl.versions import peft
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AdapterConfig

ADAPTER = AdapterConfig(rank=2, lora_alpha=4.0, target_modules=("k_proj", "q_proj"), base_model="org/base")
LAYER = "model.layers.0.self_attn.q_proj"
SHAPES = {f"{LAYER}.weight": (6, 4), "model.norm.weight": (4,)}


def tensors() -> dict[str, torch.Tensor]:
    return {peft.tensor_name(LAYER, "A"): torch.ones(2, 4), peft.tensor_name(LAYER, "B"): torch.ones(6, 2)}


def test_names_are_those_of_peft() -> None:
    name = f"base_model.model.{LAYER}.lora_A.weight"
    assert peft.tensor_name(LAYER, "A") == name
    assert peft.layer_and_part(name) == (LAYER, "A")
    for other in (name.removeprefix("base_model."), name.replace("lora_A", "lora_C"), f"{LAYER}.weight"):
        assert peft.layer_and_part(other) is None


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    peft.write_folder(tmp_path / "adapter", tensors(), peft.config_table(ADAPTER, dropout=0.1))
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {peft.CONFIG_FILE, peft.WEIGHTS_FILE}
    table, found = peft.read_folder(tmp_path / "adapter")
    assert peft.config_of(table) == ADAPTER
    assert (table["peft_type"], table["lora_dropout"]) == ("LORA", 0.1)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())


def test_an_adapter_that_fits_names_the_weights_that_it_changes() -> None:
    (weight,) = peft.check_fit(3, ADAPTER, tensors(), SHAPES)
    assert (weight.name, weight.layer, weight.experts) == (f"{LAYER}.weight", LAYER, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({peft.tensor_name(LAYER, "A"): torch.ones(3, 4)}, r"\(2, 4\) for rank 2, got \(3, 4\)"),
        ({peft.tensor_name("model.norm", "A"): torch.ones(2, 4)}, "a layer that the model does not have"),
        ({peft.tensor_name("lm_head", "A"): torch.ones(2, 4)}, "a layer that the model does not have"),
        ({"model.norm.weight": torch.ones(4)}, "no name of PEFT's"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(MeshError, match=words) as refused:
        peft.check_fit(3, ADAPTER, tensors() | change, SHAPES)
    assert refused.value.reason is Reason.LAYOUT_MISMATCH
    assert "version 3" in refused.value.message
