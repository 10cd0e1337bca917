"""Merges a LoRA adapter into base weights, to the bit as `models.lora` merges what the trainer trains.

    W' = W + (lora_alpha / rank) B A in float32, then cast to W's dtype          (arXiv 2106.09685)

Legend: R rank, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from meshrl.models.lora import PEFT_PREFIX
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AdapterConfig


def merge_adapter(
    version: int,
    adapter: AdapterConfig,
    tensors: Mapping[str, torch.Tensor],
    base: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Returns the merged weight of every adapted layer by Hugging Face name.

    `tensors` have PEFT's names, `base` the base weights' Hugging Face names. Raises MeshError LAYOUT_MISMATCH naming
    the first tensor that does not fit.
    """
    merged: dict[str, torch.Tensor] = {}
    for layer in _layers(version, adapter, tensors, base):
        a_RI = tensors[f"{PEFT_PREFIX}{layer}.lora_A.weight"].to(device).float()
        b_OR = tensors[f"{PEFT_PREFIX}{layer}.lora_B.weight"].to(device).float()
        weight_OI = base[f"{layer}.weight"]
        sum_OI = torch.add(weight_OI.float(), b_OR @ a_RI, alpha=adapter.lora_alpha / adapter.rank)
        merged[f"{layer}.weight"] = sum_OI.to(weight_OI.dtype)
    return merged


def _layers(
    version: int, adapter: AdapterConfig, tensors: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]
) -> list[str]:
    """The adapted layers, every tensor's name and shape checked."""

    def refuse(why: str) -> MeshError:
        return MeshError(Reason.LAYOUT_MISMATCH, f"version {version} does not fit the served model: {why}")

    layers: dict[str, None] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".lora_")
        if not name.startswith(PEFT_PREFIX) or not name.endswith(".weight") or part not in ("A", "B"):
            raise refuse(f"{name} is no name of PEFT's, such as {PEFT_PREFIX}<layer>.lora_A.weight")
        weight_OI = base.get(f"{layer}.weight")
        if weight_OI is None or weight_OI.dim() != 2:
            raise refuse(f"{name} is for a layer that the model does not have")
        outputs, inputs = weight_OI.shape
        expected = (adapter.rank, inputs) if part == "A" else (outputs, adapter.rank)
        if tuple(tensor.shape) != expected:
            raise refuse(f"{name} is {expected} for rank {adapter.rank}, got {tuple(tensor.shape)}")
        layers[layer] = None
    for layer in layers:
        for part in ("A", "B"):
            if f"{PEFT_PREFIX}{layer}.lora_{part}.weight" not in tensors:
                raise refuse(f"{layer} has only one of lora_A and lora_B")
    if not layers:
        raise refuse("its adapter is empty")
    return list(layers)
