"""LoRA adapters on the experts of a layer, whose matrices are one parameter of three dimensions; used by `models.lora`.

    y_e = x W_e^T + (alpha / rank) dropout(x) A_e^T B_e^T     for the tokens of expert e

The two thin products are grouped by expert as the wide one is, and added to it where transformers computes that one, so
that sorting, gates, biases and sentinels stay its own. Shapes: E experts, r rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

UP_NAMES = ("gate_up_proj", "up_proj")
DOWN_NAME = "down_proj"
RANK_STEP = 8  # grouped products on a GPU want rows of a multiple of 16 bytes


class ExpertAdapter(nn.Module):
    """The adapter of one parameter of a layer's experts, whose weight stays the experts' own."""

    def __init__(self, experts: nn.Module, parameter: str, *, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        weight = getattr(experts, parameter)
        self._of = (experts, parameter)  # in a tuple, so that the experts do not become a module of their adapter
        self.transposed = bool(experts.is_transposed)
        count, *sides = weight.shape
        self.in_features, self.out_features = sides if self.transposed else reversed(sides)
        self.rank, self.alpha, self.dropout, self.scale = rank, alpha, dropout, alpha / rank
        device = weight.device
        self.lora_A = nn.Parameter(torch.zeros(count, rank, self.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(count, self.out_features, rank, dtype=torch.float32, device=device))

    def product(self, grouped: Callable[..., torch.Tensor], inputs: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """What the adapter adds for inputs (S, in), sorted by expert; (S, out)."""
        kept = F.dropout(inputs, self.dropout) if self.training and self.dropout else inputs
        low = grouped(kept, self.lora_A.to(inputs.dtype).transpose(1, 2), offs=offs)
        return grouped(low, self.lora_B.to(inputs.dtype).transpose(1, 2), offs=offs) * self.scale

    def merged(self) -> torch.Tensor:
        """W + (alpha / rank) B A in float32, sharded as W is: by experts, so that each rank merges its own."""
        experts, parameter = self._of
        weight: Any = getattr(experts, parameter).detach()
        low: Any = self.lora_A.detach()
        high: Any = self.lora_B.detach()
        if not isinstance(weight, DTensor):
            return merge(weight, low, high, scale=self.scale, transposed=self.transposed)
        device = weight.device_mesh.device_type
        own = [cast("DTensor", each.to(device)).to_local() for each in (weight, low, high)]
        return DTensor.from_local(
            merge(*own, scale=self.scale, transposed=self.transposed),
            weight.device_mesh,
            weight.placements,
            shape=weight.shape,
            stride=weight.stride(),
        )


def merge(
    weight: torch.Tensor, low: torch.Tensor, high: torch.Tensor, *, scale: float, transposed: bool
) -> torch.Tensor:
    """W + scale B A of all experts in float32; `transposed`: W is (E, in, out), not (E, out, in)."""
    added = torch.bmm(high.float(), low.float())
    return torch.add(weight.float(), added.transpose(1, 2) if transposed else added, alpha=scale)


def adapt(
    model: nn.Module, targets: Sequence[str], *, rank: int, alpha: float, dropout: float
) -> dict[str, ExpertAdapter]:
    """Puts adapters on the parameters of experts that the targets name, by PEFT's rule; the adapters by those names.

    Raises ValueError, with the model as it was, for a target that names none, for only one of the two parameters of a
    layer's experts, and for experts that are not computed by grouped products.
    """
    holders: dict[str, tuple[Any, str]] = {
        f"{name}.{parameter}": (module, parameter)
        for name, module in model.named_modules()
        for parameter, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3 and parameter in (*UP_NAMES, DOWN_NAME)
    }
    chosen: dict[str, tuple[Any, str]] = {}
    for target in targets:
        found = {name: one for name, one in holders.items() if name == target or name.endswith("." + target)}
        if not found:
            raise ValueError(
                f"model.lora.target_parameters: {target!r} names no experts' parameter; this model has "
                + (", ".join(sorted({".".join(name.split(".")[-3:]) for name in holders})) or "none")
            )
        chosen |= found
    if targets and rank % RANK_STEP:
        raise ValueError(
            f"model.lora.rank is {rank}, and adapters of experts need a multiple of {RANK_STEP}; take "
            f"{rank + -rank % RANK_STEP}"
        )
    for name, (module, _) in chosen.items():
        layer = name.rpartition(".")[0]
        if missing := [other for other in holders if other.rpartition(".")[0] == layer and other not in chosen]:
            raise ValueError(
                f"model.lora.target_parameters: {name} is named and {missing[0]} is not; name both, since engines load "
                "the adapters of a layer's experts together"
            )
        if not hasattr(module, "has_gate") or module.config._experts_implementation != "grouped_mm":
            raise ValueError(
                f"model.lora.target_parameters: the experts of {type(module).__name__} are not computed by grouped "
                "products, so they cannot be adapted; leave it out"
            )
    adapted: dict[str, ExpertAdapter] = {}
    for name, (module, parameter) in chosen.items():
        if not hasattr(module, "adapters"):
            module.adapters = nn.ModuleDict()
            module.forward = functools.partial(_forward, module, module.forward)
        made = ExpertAdapter(module, parameter, rank=rank, alpha=alpha, dropout=dropout)
        module.adapters[parameter] = adapted[name] = made
    return adapted


def _forward(experts: Any, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    up = next(name for name in UP_NAMES if name in experts.adapters)
    with _Adding([experts.adapters[up], experts.adapters[DOWN_NAME]]) as adding:
        output = forward(*args, **kwargs)
    if adding.left:
        raise RuntimeError(f"{len(adding.left)} adapters of {type(experts).__name__} were passed by")
    return output


class _Adding(TorchFunctionMode):
    """While experts run: adds what the adapters give to their grouped products, which come in the adapters' order."""

    def __init__(self, adapters: list[ExpertAdapter]) -> None:
        super().__init__()
        self.left = adapters

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if "grouped_mm" not in getattr(func, "__name__", "") or not self.left:
            return output
        return output + self.left.pop(0).product(func, args[0], (kwargs or {})["offs"])
