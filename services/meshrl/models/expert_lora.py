"""LoRA adapters on the experts of a layer, whose matrices are one parameter of three dimensions.

    y_e = x W_e^T + (alpha / rank) dropout(x) A_e^T B_e^T     for the tokens of expert e

The two thin products are grouped by expert and added where transformers computes the wide one, so that sorting, gates,
biases and sentinels stay its own. Shapes: E experts, r rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from meshrl.core.config.shared import ALL_EXPERTS, EXPERT_RANK_STEP
from meshrl.models.adapters import AdapterHolder
from meshrl.models.sharded import by_parts

UP_NAMES = ("gate_up_proj", "up_proj")
DOWN_NAME = "down_proj"


class ExpertAdapter(AdapterHolder):
    def __init__(self, experts: nn.Module, parameter: str) -> None:
        super().__init__()
        weight = getattr(experts, parameter)
        self._of = (experts, parameter)  # in a tuple, so that the experts do not become a module of their adapter
        self.transposed = bool(experts.is_transposed)
        self.count, *sides = weight.shape
        self.stacked = (self.count,)
        self.own = slice(None)  # the experts of this rank, where ranks divide them; each rank has all adapters
        self.in_features, self.out_features = sides if self.transposed else reversed(sides)
        self.hold(None)

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if rank % EXPERT_RANK_STEP:
            raise ValueError(
                f"model.lora.rank is {rank}, and adapters of experts need a multiple of {EXPERT_RANK_STEP}; take "
                f"{rank + -rank % EXPERT_RANK_STEP}, or leave experts out by model.lora.target_parameters = []"
            )
        return super().shapes(rank)

    def product(self, grouped: Callable[..., torch.Tensor], inputs: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """The adapter's addition for inputs (S, in), sorted by expert; (S, out)."""
        kept = F.dropout(inputs, self.dropout) if self.training and self.dropout else inputs
        low = grouped(kept, self.lora_A[self.own].to(inputs.dtype).transpose(1, 2), offs=offs)
        return grouped(low, self.lora_B[self.own].to(inputs.dtype).transpose(1, 2), offs=offs) * self.scale

    def merged(self) -> torch.Tensor:
        """W + (alpha / rank) B A in float32, sharded as W is; each rank merges its own experts."""
        experts, parameter = self._of
        weight: torch.Tensor = getattr(experts, parameter).detach()
        low, high = self.lora_A.detach(), self.lora_B.detach()

        def part(own: torch.Tensor, of: slice, *_: slice) -> torch.Tensor:
            return merge(own, low[of], high[of], scale=self.scale, transposed=self.transposed)

        return by_parts(weight, part, device=low.device)


def merge(
    weight: torch.Tensor, low: torch.Tensor, high: torch.Tensor, *, scale: float, transposed: bool
) -> torch.Tensor:
    """W + scale B A in float32; `transposed`: W is (E, in, out), not (E, out, in)."""
    added = torch.bmm(high.float(), low.float())
    return torch.add(weight.float(), added.transpose(1, 2) if transposed else added, alpha=scale)


def expert_parameters(model: nn.Module, targets: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """The parameters of experts that the targets name by PEFT's rule, each as its module and its name there.

    Raises ValueError for a target without any, for one alone of a layer's two, and for experts that are not computed by
    grouped products.
    """
    holders: dict[str, tuple[Any, str]] = {
        f"{name}.{parameter}": (module, parameter)
        for name, module in model.named_modules()
        for parameter, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3 and parameter in (*UP_NAMES, DOWN_NAME)
    }
    chosen: dict[str, tuple[Any, str]] = {}
    for target in targets:
        if target == ALL_EXPERTS:
            chosen |= {name: one for name, one in holders.items() if _grouped(one[0])}
            continue
        found = {name: one for name, one in holders.items() if name == target or name.endswith("." + target)}
        if not found:
            raise ValueError(
                f"model.lora.target_parameters: {target!r} names no experts' parameter; this model has "
                + (", ".join(sorted({".".join(name.split(".")[-3:]) for name in holders})) or "none")
            )
        chosen |= found
    for name, (module, _) in chosen.items():
        layer = name.rpartition(".")[0]
        if missing := [other for other in holders if other.rpartition(".")[0] == layer and other not in chosen]:
            raise ValueError(
                f"model.lora.target_parameters: {name} is named and {missing[0]} is not; name both, since engines load "
                "the adapters of a layer's experts together"
            )
        if not _grouped(module):
            raise ValueError(
                f"model.lora.target_parameters: the experts of {type(module).__name__} are not computed by grouped "
                "products, so they cannot be adapted; leave it out"
            )
    return chosen


def _grouped(experts: Any) -> bool:
    return hasattr(experts, "has_gate") and experts.config._experts_implementation == "grouped_mm"


def expert_adapters(model: nn.Module, targets: Sequence[str]) -> dict[str, ExpertAdapter]:
    """Prepares what `expert_parameters` finds; raises as it does."""
    adapted: dict[str, ExpertAdapter] = {}
    for name, (module, parameter) in expert_parameters(model, targets).items():
        if not hasattr(module, "adapters"):
            module.adapters = nn.ModuleDict()
            module.forward = functools.partial(with_adapters, module, module.forward)
        if parameter not in module.adapters:
            module.adapters[parameter] = ExpertAdapter(module, parameter)
        adapted[name] = module.adapters[parameter]
    return adapted


def with_adapters(experts: Any, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Calls `forward`, of two grouped products, with the adapters of the experts beside each."""
    up = next(name for name in UP_NAMES if name in experts.adapters)
    if not experts.adapters[up].rank:
        return forward(*args, **kwargs)
    with _Adding([experts.adapters[up], experts.adapters[DOWN_NAME]]) as adding:
        output = forward(*args, **kwargs)
    if adding.left:
        raise RuntimeError(f"{len(adding.left)} adapters of {type(experts).__name__} were passed by")
    return output


class _Adding(TorchFunctionMode):
    """While experts run: adds the adapters' output to their grouped products, which come in the adapters' order."""

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
