"""Adapter sets: the adapters of one run as one flat tensor, mounted on the model's layers for the run's passes.

A set has a rank, an alpha and layers of its own, and can be made at any time, also once the model is sharded: its
matrices are no part of FSDP, every rank has all of them, and ranks sum their gradient once a step. A layer has the
adapter of the set that was mounted last, or none. What is mounted stays from a forward pass to the end of its backward
pass, since activation checkpointing computes the forward pass again.

Shapes: P scalars of a set, each matrix padded to 64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

A, B = "lora_A", "lora_B"
ALIGNED = 16  # float32 scalars: matrices begin where tensors of their own would, so products have the same bits


@dataclass(frozen=True, kw_only=True)
class AdapterScale:
    """The numbers of an adapter, whose output is scaled by alpha / rank; `dropout` of its inputs in training."""

    rank: int
    alpha: float
    dropout: float = 0.0


class AdapterHolder(nn.Module):
    """A layer that may have an adapter. Without one its rank is 0 and it computes what its base does."""

    lora_A: nn.Parameter  # noqa: N815  # PEFT's names; None while no adapter is mounted, as `rank` shows
    lora_B: nn.Parameter  # noqa: N815

    def hold_none(self) -> None:
        """Takes the adapter away."""
        self.rank, self.alpha, self.dropout, self.scale = 0, 0.0, 0.0, 0.0
        self.adapter_set: AdapterSet | None = None
        for part in (A, B):
            self.register_parameter(part, None)

    def hold(self, adapter_set: AdapterSet, low: nn.Parameter, high: nn.Parameter) -> None:
        """Takes the set's matrices for this layer, A `low` and B `high`."""
        scale = adapter_set.scale
        self.rank, self.alpha, self.dropout = scale.rank, scale.alpha, scale.dropout
        self.scale = scale.alpha / scale.rank
        self.adapter_set = adapter_set
        self.lora_A, self.lora_B = low, high

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A and of B for a rank."""
        raise NotImplementedError


class AdapterSet:
    """The adapters of one run: flat (P,) float32, of which `matrices` are views; zeros when made."""

    def __init__(
        self, layers: Mapping[str, AdapterHolder], chosen: Mapping[str, AdapterHolder], scale: AdapterScale,
        *, device: torch.device,
    ) -> None:  # fmt: skip
        """`layers` are all layers of the model that sets may adapt; `chosen` are those of this set."""
        self.scale = scale
        self._layers, self._chosen = dict(layers), set(chosen)
        shapes = {name: layer.shapes(scale.rank) for name, layer in chosen.items()}
        self.flat = torch.zeros(
            sum(_padded(shape) for pair in shapes.values() for shape in pair), dtype=torch.float32, device=device
        )
        self.gradient: torch.Tensor | None = None
        self._places: list[tuple[nn.Parameter, int]] = []
        self.matrices: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        at = 0
        for name, pair in shapes.items():
            made = []
            for shape in pair:
                made.append(nn.Parameter(self.flat[at : at + math.prod(shape)].view(shape)))
                self._places.append((made[-1], at))
                at += _padded(shape)
            self.matrices[name] = (made[0], made[1])

    @property
    def numel(self) -> int:
        """Scalars of all matrices, without padding."""
        return sum(parameter.numel() for parameter, _ in self._places)

    @property
    def mounted(self) -> bool:
        """Whether the layers have the adapters of this set."""
        return self._layers[next(iter(self._chosen))].adapter_set is self

    def mount(self) -> None:
        """Gives each layer its adapter of this set; the others lose theirs."""
        for name, layer in self._layers.items():
            if name in self._chosen:
                layer.hold(self, *self.matrices[name])
            else:
                layer.hold_none()

    def open_gradient(self) -> None:
        """Makes room for the gradient, where backward passes add to; it stays until `drop_gradient`."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.flat)
            for parameter, at in self._places:
                parameter.grad = self.gradient[at : at + parameter.numel()].view(parameter.shape)

    def sum_gradient(self) -> None:
        """Sums the gradient over all ranks of the process group; without one it is the sum already."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.open_gradient()
            assert self.gradient is not None
            dist.all_reduce(self.gradient)

    def drop_gradient(self) -> None:
        """Frees the gradient."""
        self.gradient = None
        for parameter, _ in self._places:
            parameter.grad = None


def mounted_set(model: nn.Module) -> AdapterSet | None:
    """The set whose adapters the model's layers have."""
    return next((each.adapter_set for each in model.modules() if isinstance(each, AdapterHolder) and each.rank), None)


def _padded(shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) // ALIGNED) * ALIGNED
