"""A model's weights by Hugging Face name, whole or as this rank's rows, for checkpoints and versions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshrl.models.lora import adapted_weights, is_adapter
from meshrl.models.sharded import gather_whole, local

FLOAT32_ROUTERS = frozenset({"glm4_moe", "hy_v3", "minimax_m2"})
"""Model types whose routers vLLM keeps in float32, and transformers only computes in it."""

ROUTER_BIASES = frozenset({"e_score_correction_bias", "expert_bias", "balancing_biases"})


def hf_state(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, sorted by name; a tied tensor once, under its first name.

    Tensors share memory with the model unless `dtype` asks for another floating-point type; some are always float32
    (`keep_float32`). LoRA adapters are merged into their weights in float32, collectively if those are sharded.
    """
    return dict(_tensors(model, dtype))


def _tensors(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    adapted = adapted_weights(model)
    for name, tensor in stored_tensors(model).items():
        yield name, (adapted[name].merged() if name in adapted else tensor).to(_wanted(model, name, tensor, dtype))


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The published tensors as the model stores them, sorted by name, without adapters."""
    every_parameter = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters() if not is_adapter(name)}
    for name, tensor in model.state_dict().items():
        if name not in every_parameter:
            tensors[name] = tensor.detach()
    return dict(sorted(tensors.items()))


def keep_float32(model: nn.Module) -> None:
    """Turns the tensors that `stays_float32` names to it."""
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if tensor.is_floating_point() and stays_float32(model, name):
            tensor.data = tensor.data.float()


def stays_float32(model: nn.Module, name: str) -> bool:
    """Whether a tensor is float32 in a model of any dtype, as in transformers, or of a router.

    Choices among experts depend on differences that bfloat16 rounds away.
    """
    patterns = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if getattr(getattr(model, "config", None), "model_type", None) in FLOAT32_ROUTERS:
        patterns.append("mlp.gate.weight")
    return name.rpartition(".")[2] in ROUTER_BIASES or any(
        re.search(pattern.replace("*", ".*"), name) for pattern in patterns
    )


def _wanted(model: nn.Module, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if stays_float32(model, name) else dtype


@torch.no_grad()
def gather_state(model: nn.Module, dtype: torch.dtype | None = None, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """A contiguous copy of `hf_state` on the CPU, of a sharded model too; collective, a parameter at a time.

    Only a rank that asks to `keep` the state gets it; the others get an empty one.
    """
    gathered: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(model, dtype):
        whole = gather_whole(tensor)
        if keep:
            gathered[name] = whole.to("cpu", copy=True).contiguous()
    return gathered


@dataclass(frozen=True, kw_only=True)
class PublishedTensor:
    """A tensor of `hf_state`. `in_rows`: each sender has one of the parts that torch.chunk makes of it, in the order of
    the ranks, or where it is `reordered` in that of ParallelPlan.row_order; else all of it.

    Tensors of one-byte elements always count as whole, so that no rank has half of a 16-bit word.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    in_rows: bool
    reordered: bool


def published_tensors(
    model: nn.Module, dtype: torch.dtype | None = None, *, num_senders: int = 1
) -> tuple[PublishedTensor, ...]:
    """What `hf_state` would hold, without making it."""
    return tuple(
        PublishedTensor(
            name=name,
            dtype=_wanted(model, name, tensor, dtype),
            shape=tuple(tensor.shape),
            in_rows=_leaves_in_rows(tensor, _wanted(model, name, tensor, dtype)),
            reordered=_has_rows(tensor, num_senders) and len(_divisions(tensor)) > 1,
        )
        for name, tensor in stored_tensors(model).items()
    )


@torch.no_grad()
def own_rows(
    model: nn.Module, dtype: torch.dtype | None = None, *, sender: int = 0, num_senders: int = 1
) -> dict[str, torch.Tensor]:
    """A sender's rows of each tensor that is `in_rows`, and the whole of each other one; collective.

    Rows that this rank holds share memory with the model and have its types; those of a tensor that ranks divide
    otherwise, or that is merged, come cast.
    """
    adapted = adapted_weights(model)
    rows: dict[str, torch.Tensor] = {}
    for name, stored in stored_tensors(model).items():
        wanted = _wanted(model, name, stored, dtype)
        tensor = adapted[name].merged().to(wanted) if name in adapted else stored
        if not _leaves_in_rows(tensor, wanted):
            rows[name] = gather_whole(tensor)
        elif _has_rows(tensor, num_senders):
            rows[name] = local(tensor)
        else:
            step = -(-tensor.shape[0] // num_senders)
            rows[name] = gather_whole(tensor.to(wanted))[sender * step : (sender + 1) * step].clone()
    return rows


def _leaves_in_rows(tensor: torch.Tensor, wanted: torch.dtype) -> bool:
    return isinstance(tensor, DTensor) and wanted.itemsize > 1


def _has_rows(tensor: torch.Tensor, num_senders: int) -> bool:
    divisions = _divisions(tensor)
    if any(placement.dim for placement, _ in divisions) or math.prod(size for _, size in divisions) != num_senders:
        return False
    experts = isinstance(tensor, DTensor) and "ep" in (tensor.device_mesh.mesh_dim_names or ())
    return len(divisions) < 2 or (experts and tensor.shape[0] % num_senders == 0)


def _divisions(tensor: torch.Tensor) -> list[tuple[Any, int]]:
    if not isinstance(tensor, DTensor):
        return []
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return [(placement, size) for placement, size in sizes if size > 1 and not placement.is_replicate()]
