"""Runs linear layers that read the same input as one matrix product: q, k and v, or gate and up, of each block.

The modeling code stays as it is. The members' weights become views of one stacked matrix; the first member that is
called with an input computes the whole product, the others take their slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinears:
    """Sibling linear layers without bias over one stacked weight (sum of outputs, inputs)."""

    def __init__(self, weight_names: Sequence[str], members: Sequence[nn.Linear]) -> None:
        self.weight_names = tuple(weight_names)
        self._members = tuple(members)
        self._sizes = [member.out_features for member in members]
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._left = 0
        self.weight = self.stack({name: each.weight for name, each in zip(weight_names, members, strict=True)})
        for place, (member, view) in enumerate(zip(members, self.views(self.weight), strict=True)):
            member.weight.data = view
            # an attribute of the instance goes before the method of its class
            member.forward = self._forward_of(place)  # type: ignore[method-assign, assignment]  # on purpose, see above

    def stack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A new stacked weight from the members' weights by name."""
        return torch.cat([tensors[name].detach() for name in self.weight_names])

    def views(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The members' weights in a stacked one."""
        return torch.split(weight, self._sizes)

    def _forward_of(self, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(states: torch.Tensor) -> torch.Tensor:
            if states is not self._input:
                self._input, self._left = states, len(self._sizes)
                self._outputs = torch.split(F.linear(states, self.weight), self._sizes, dim=-1)
            output = self._outputs[place]
            self._left -= 1
            if self._left == 0:  # every member has its slice: keep nothing alive
                self._input, self._outputs = None, ()
            return output

        return forward


def fuse(model: nn.Module) -> tuple[FusedLinears, ...]:
    """Fuses every group of siblings in the model; blocks that are built otherwise are left alone."""
    return tuple(_groups(model))


def _groups(model: nn.Module) -> Iterator[FusedLinears]:
    for path, module in model.named_modules():
        for names in SIBLINGS:
            members = dict(module.named_children())
            found = [members.get(name) for name in names]
            linears = [each for each in found if isinstance(each, nn.Linear) and _is_plain(each)]
            if len(linears) == len(names) and len({each.in_features for each in linears}) == 1:
                yield FusedLinears([f"{path}.{name}.weight" for name in names], linears)


def _is_plain(layer: nn.Linear) -> bool:
    """Nothing but a matrix product: no subclass with other ideas (quantised, LoRA) and no bias."""
    return type(layer) is nn.Linear and layer.bias is None
