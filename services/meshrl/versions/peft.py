"""LoRA adapters in PEFT's format: the names of tensors, the two files of a folder, and which shapes fit a model.

The trainer uses it to name the tensors of adapter versions and to write adapter folders; engines use it to check, merge
and load adapters. Format: https://huggingface.co/docs/peft/developer_guides/checkpoint

A layer is the full name of a linear layer, such as model.layers.0.self_attn.q_proj; its two matrices are A (rank,
inputs) and B (outputs, rank).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AdapterConfig
from meshrl.wire.values import JsonObject

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PARTS = ("A", "B")


def tensor_name(layer: str, part: str) -> str:
    """PEFT's name of matrix "A" or "B" of a layer's adapter."""
    return f"{PREFIX}{layer}.lora_{part}.weight"


def layer_and_part(name: str) -> tuple[str, str] | None:
    """What `tensor_name` put together; None for a name that it does not make."""
    layer, _, part = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
    return (layer, part) if part in PARTS and name == tensor_name(layer, part) else None


def config_table(adapter: AdapterConfig, *, dropout: float = 0.0) -> dict[str, object]:
    """The adapter_config.json of a plain LoRA adapter, scaled by lora_alpha / rank."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.lora_alpha,
        "lora_dropout": dropout,
        "target_modules": list(adapter.target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def config_of(table: JsonObject) -> AdapterConfig:
    """The adapter that a table describes. Raises KeyError, TypeError or ValueError for one that describes none."""
    return AdapterConfig(
        rank=int(table["r"]),
        lora_alpha=float(table["lora_alpha"]),
        target_modules=tuple(sorted(table["target_modules"])),
        base_model=str(table.get("base_model_name_or_path", "")),
    )


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor], table: Mapping[str, object]) -> None:
    """Writes a folder that PEFT and vLLM load, of tensors in PEFT's names. Raises OSError, SafetensorError."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(table, indent=2) + "\n")


def read_folder(folder: Path) -> tuple[JsonObject, dict[str, torch.Tensor]]:
    """The table and the tensors of a folder. Raises OSError, ValueError, SafetensorError."""
    return json.loads((folder / CONFIG_FILE).read_text()), load_file(folder / WEIGHTS_FILE)


def check_fit(
    version: int, adapter: AdapterConfig, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]
) -> list[str]:
    """Returns the layers that an adapter changes.

    `shapes` are those of the base weights by Hugging Face name. Raises MeshError LAYOUT_MISMATCH naming the first
    tensor that does not fit.
    """

    def refuse(why: str) -> MeshError:
        return MeshError(Reason.LAYOUT_MISMATCH, f"version {version} does not fit the served model: {why}")

    layers: dict[str, None] = {}
    for name, tensor in tensors.items():
        parsed = layer_and_part(name)
        if parsed is None:
            raise refuse(f"{name} is no name of PEFT's, such as {tensor_name('<layer>', 'A')}")
        layer, part = parsed
        shape = shapes.get(f"{layer}.weight")
        if shape is None or len(shape) != 2:
            raise refuse(f"{name} is for a layer that the model does not have")
        outputs, inputs = shape
        expected = (adapter.rank, inputs) if part == "A" else (outputs, adapter.rank)
        if tuple(tensor.shape) != expected:
            raise refuse(f"{name} is {expected} for rank {adapter.rank}, got {tuple(tensor.shape)}")
        layers[layer] = None
    for layer in layers:
        if any(tensor_name(layer, part) not in tensors for part in PARTS):
            raise refuse(f"{layer} has only one of lora_A and lora_B")
    if not layers:
        raise refuse("its adapter is empty")
    return list(layers)
