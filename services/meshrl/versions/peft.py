"""LoRA adapters in PEFT's format: the names of tensors, the two files of a folder, and which shapes fit a model.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. A layer is the full name of a linear layer, such
as model.layers.0.self_attn.q_proj; its two matrices are A (rank, inputs) and B (outputs, rank).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from meshrl.versions.layout import layout_of
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import plan_tensors
from meshrl.wire.manifest_file import safetensors_header
from meshrl.wire.types import AdapterConfig
from meshrl.wire.values import JsonObject

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PARTS = ("A", "B")
EXPERTS = re.compile(r"(?:^|\.)experts\.(gate_up_proj|up_proj|down_proj)$")
"""Parameters of all experts of a layer: PEFT wraps the up projection first, then the down projection."""


def tensor_name(layer: str, part: str) -> str:
    return f"{PREFIX}{layer}.lora_{part}.weight"


def layer_and_part(name: str) -> tuple[str, str] | None:
    """The inverse of `tensor_name`; None for a name that it does not make."""
    layer, _, part = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
    return (layer, part) if part in PARTS and name == tensor_name(layer, part) else None


def wrapper_of(parameter: str) -> str:
    """The layer under which PEFT stores the adapter of a parameter of experts."""
    experts, _, name = parameter.rpartition(".")
    return experts if name == "down_proj" else f"{experts}.base_layer"


def stored_experts(tensor: torch.Tensor, part: str) -> torch.Tensor:
    """A (E, r, in) as PEFT stores it, (E r, in), or B (E, out, r), stored as (out, r E): there experts come last."""
    return tensor.flatten(0, 1) if part == "A" else tensor.permute(1, 2, 0).flatten(1)


def read_experts(stored: torch.Tensor, experts: int, part: str) -> torch.Tensor:
    """The inverse of `stored_experts`. Raises RuntimeError for a shape that is none of so many experts."""
    if part == "A":
        return stored.reshape(experts, -1, stored.shape[-1])
    return stored.reshape(stored.shape[0], -1, experts).permute(2, 0, 1)


def config_table(adapter: AdapterConfig, *, dropout: float = 0.0) -> dict[str, object]:
    """The adapter_config.json of a plain LoRA adapter, scaled by lora_alpha / rank.

    PEFT adapts experts without dropout alone.
    """
    of_experts = [target for target in adapter.target_modules if EXPERTS.search(target)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.lora_alpha,
        "lora_dropout": 0.0 if of_experts else dropout,
        "target_modules": [target for target in adapter.target_modules if not EXPERTS.search(target)],
        **({"target_parameters": of_experts} if of_experts else {}),
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
        target_modules=tuple(sorted([*table["target_modules"], *(table.get("target_parameters") or ())])),
        base_model=str(table.get("base_model_name_or_path", "")),
    )


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor], table: Mapping[str, object]) -> None:
    """Writes a folder that PEFT and vLLM load, of tensors in PEFT's names. Raises OSError.

    safetensors' own `save_file` would hold other threads up for a tenth of a second.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plans = plan_tensors(layout_of(tensors))
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(safetensors_header(plans, {"format": "pt"}))
        for plan in plans:
            file.write(tensors[plan.name].contiguous().flatten().view(torch.uint8).numpy().data)
    (folder / CONFIG_FILE).write_text(json.dumps(table, indent=2) + "\n")


def read_folder(folder: Path) -> tuple[JsonObject, dict[str, torch.Tensor]]:
    """The table and the tensors of a folder. Raises OSError, ValueError, SafetensorError."""
    return json.loads((folder / CONFIG_FILE).read_text()), load_file(folder / WEIGHTS_FILE)


@dataclass(frozen=True, kw_only=True)
class AdaptedWeight:
    """A base weight that an adapter changes, and the `layer` under which PEFT stores its matrices.

    `experts` is 0 for a linear layer's; `transposed`: those of experts are (experts, inputs, outputs).
    """

    name: str
    layer: str
    experts: int = 0
    transposed: bool = False


def check_fit(
    version: int, adapter: AdapterConfig, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]
) -> list[AdaptedWeight]:
    """The weights that an adapter changes; `shapes` are those of the base weights by Hugging Face name.

    Raises MeshError LAYOUT_MISMATCH naming the first tensor that does not fit.
    """

    def refuse(why: str) -> MeshError:
        return MeshError(Reason.LAYOUT_MISMATCH, f"version {version} does not fit the served model: {why}")

    weights: dict[str, AdaptedWeight] = {}
    for name, tensor in tensors.items():
        parsed = layer_and_part(name)
        if parsed is None:
            raise refuse(f"{name} is no name of PEFT's, such as {tensor_name('<layer>', 'A')}")
        layer, part = parsed
        weight = weights.get(layer) or _adapted_weight(layer, tensors, shapes)
        if weight is None:
            raise refuse(f"{name} is for a layer that the model does not have")
        *_, first, second = shapes[weight.name]
        inputs, outputs = (first, second) if weight.transposed else (second, first)
        rank = adapter.rank * max(1, weight.experts)
        expected = (rank, inputs) if part == "A" else (outputs, rank)
        if tuple(tensor.shape) != expected:
            raise refuse(f"{name} is {expected} for rank {adapter.rank}, got {tuple(tensor.shape)}")
        weights[layer] = weight
    for layer in weights:
        if any(tensor_name(layer, part) not in tensors for part in PARTS):
            raise refuse(f"{layer} has only one of lora_A and lora_B")
    if not weights:
        raise refuse("its adapter is empty")
    return list(weights.values())


def _adapted_weight(
    layer: str, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]
) -> AdaptedWeight | None:
    if len(shapes.get(f"{layer}.weight", ())) == 2:
        return AdaptedWeight(name=f"{layer}.weight", layer=layer)
    experts = layer.removesuffix(".base_layer")
    up = next((name for name in ("gate_up_proj", "up_proj") if f"{experts}.{name}" in shapes), None)
    if up is None or f"{experts}.down_proj" not in shapes:
        return None
    # Square matrices do not show which side is theirs, but those of experts are not all square.
    sides = {}
    for name, wrapper in ((up, f"{experts}.base_layer"), ("down_proj", experts)):
        matrix = tensors.get(tensor_name(wrapper, "A"))
        _, first, second = shapes[f"{experts}.{name}"]
        if matrix is not None and first != second:
            sides[name] = matrix.shape[-1] == first
    own = up if layer.endswith(".base_layer") else "down_proj"
    return AdaptedWeight(
        name=f"{experts}.{own}",
        layer=layer,
        experts=shapes[f"{experts}.{own}"][0],
        transposed=sides.get(own, next(iter(sides.values()), False)),
    )
