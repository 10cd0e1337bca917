"""Adapter sets: the adapters of one run as one flat tensor, mounted on the model's layers for the run's passes.

Matrices are no part of FSDP: every rank has all of them, and ranks sum their gradient once a step. A set stays mounted
to the end of the backward pass, since activation checkpointing computes the forward pass again. For a row that several
runs share, `JoinedSets` mounts each set on the tokens of its run.

Shapes: P scalars of a set, each matrix padded to 64 bytes; T tokens of a row, G sets on it, R their highest rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from meshrl.core.config.shared import EXPERT_RANK_STEP

A, B = "lora_A", "lora_B"
Matrix = TypeVar("Matrix", bound=torch.Tensor)
ALIGNED = 16  # float32 scalars: matrices begin where tensors of their own would, so products have the same bits


@dataclass(frozen=True, kw_only=True)
class AdapterScale:
    """`dropout` is of an adapter's inputs, in training."""

    rank: int
    alpha: float
    dropout: float = 0.0

    @property
    def factor(self) -> float:
        return self.alpha / self.rank


class AdapterHolder(nn.Module):
    """A layer that may have an adapter. Without one its rank is 0."""

    lora_A: nn.Parameter  # noqa: N815  # PEFT's names; None while no adapter is mounted, as `rank` shows
    lora_B: nn.Parameter  # noqa: N815
    rank: int
    dropout: float
    scale: float  # alpha / rank
    adapter_set: AdapterSet | None
    joined: JoinedLayer | None
    in_features: int
    out_features: int
    stacked: tuple[int, ...] = ()
    """The matrices' first dimension, of experts. Empty for a layer without."""

    def hold(
        self, adapter_set: AdapterSet | None, low: nn.Parameter | None = None, high: nn.Parameter | None = None
    ) -> None:
        """Takes the set's matrices A `low` and B `high`; None takes the adapter away."""
        scale = None if adapter_set is None else adapter_set.scale
        # Not by nn.Module's own setting: that takes 50 us a layer, at each turn of a run.
        self.__dict__.update(
            rank=scale.rank if scale else 0,
            dropout=scale.dropout if scale else 0.0,
            scale=scale.factor if scale else 0.0,
            adapter_set=adapter_set,
            joined=None,
        )
        self._parameters.update({A: low, B: high})

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A (..., rank, in) and of B (..., out, rank). Raises ValueError for a rank that cannot be."""
        return (*self.stacked, rank, self.in_features), (*self.stacked, self.out_features, rank)


class AdapterSet:
    """The adapters of one run: flat (P,) float32, of which `matrices` are views; zeros when made."""

    def __init__(
        self, layers: Mapping[str, AdapterHolder], chosen: Mapping[str, AdapterHolder], scale: AdapterScale,
        *, device: torch.device, saved: Mapping[str, nn.Parameter] | None = None,
    ) -> None:  # fmt: skip
        """`layers` are all that sets may adapt, `chosen` those of this set; `saved` is trained whole beside them."""
        self.scale = scale
        self.layers, self.saved = dict(layers), dict(saved or {})
        shapes = {name: layer.shapes(scale.rank) for name, layer in chosen.items()}
        self._shapes = [shape for pair in shapes.values() for shape in pair]
        self.flat = torch.zeros(sum(map(_padded, self._shapes)), dtype=torch.float32, device=device)
        self.gradient: torch.Tensor | None = None
        self._parameters = [nn.Parameter(view) for view in _views(self.flat, self._shapes)]
        self.matrices = dict(zip(shapes, _in_twos(self._parameters), strict=True))

    def by_layer(self, flat: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The two matrices of each layer, as views of a tensor that is laid out as `flat`."""
        return dict(zip(self.matrices, _in_twos(_views(flat, self._shapes)), strict=True))

    @property
    def numel(self) -> int:
        """Scalars of all matrices, without padding."""
        return sum(map(math.prod, self._shapes))

    @property
    def mounted(self) -> bool:
        return self.layers[next(iter(self.matrices))].adapter_set is self

    def mount(self) -> None:
        """Gives each layer its adapter of this set; the others lose theirs."""
        for name, layer in self.layers.items():
            if name in self.matrices:
                layer.hold(self, *self.matrices[name])
            else:
                layer.hold(None)

    def open_gradient(self) -> None:
        """Makes room for the gradient, until `drop_gradient`."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.flat)
            for parameter, view in zip(self._parameters, _views(self.gradient, self._shapes), strict=True):
                parameter.grad = view

    def sum_gradient(self) -> None:
        """Collective where there is a process group."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.open_gradient()
            assert self.gradient is not None
            dist.all_reduce(self.gradient)

    def drop_gradient(self) -> None:
        self.gradient = None
        for parameter in self._parameters:
            parameter.grad = None


grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # public since torch 2.13


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Which tokens of a row are whose, for the G sets on it."""

    tokens: tuple[slice, ...]
    scales: tuple[AdapterScale, ...]
    ends: torch.Tensor | None  # int32 (G,), for grouped products; None: a product for each set
    factors: torch.Tensor  # alpha / rank of each token, (T, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedLayer:
    """A layer's adapters for a row of several sets: A `low` (G, R, in), B `high` (G, out, R), zeros beyond each rank
    and for a set without this layer."""

    segments: Segments
    low: torch.Tensor
    high: torch.Tensor
    held: tuple[bool, ...]  # by each set

    def added(self, output: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The base's output (..., T, out) plus the adapters' for inputs (..., T, in)."""
        segments, dtype = self.segments, output.dtype
        widths = self.low.shape[2], self.high.shape[1]
        if (
            segments.ends is not None
            and dtype is torch.bfloat16
            and not any(width % EXPERT_RANK_STEP for width in widths)
        ):
            inputs_TI = inputs.flatten(0, -2).to(dtype)
            reduced_TR = grouped_mm(inputs_TI, self.low.to(dtype).transpose(1, 2), offs=segments.ends)
            reduced_TR = (reduced_TR * segments.factors).to(dtype)
            added_TO = grouped_mm(reduced_TR, self.high.to(dtype).transpose(1, 2), offs=segments.ends)
            return output + added_TO.view_as(output)
        parts = []
        for place, (tokens, scale) in enumerate(zip(segments.tokens, segments.scales, strict=True)):
            part = output[..., tokens, :]
            if self.held[place]:
                reduced = F.linear(inputs[..., tokens, :], self.low[place, : scale.rank].to(inputs.dtype))
                added = F.linear(reduced, self.high[place, :, : scale.rank].to(reduced.dtype))
                part = torch.add(part, added, alpha=scale.factor)
            parts.append(part)
        return torch.cat(parts, dim=-2)


class JoinedSets:
    """While it is entered, several runs' sets are on a model's layers, each for the tokens of its run; without dropout.

    Passes train copies, so one that fails leaves the sets' gradients as they were.
    """

    def __init__(self, sets: Sequence[AdapterSet], lengths: Sequence[int], *, grouped: bool) -> None:
        """`lengths`: a row's tokens of each set, in order. `grouped`: one product for all sets, where dtypes allow."""
        some = any(lengths)  # grouped products cannot have empty groups, and a rank's row may be empty
        here = [(each, length) for each, length in zip(sets, lengths, strict=True) if length or not some]
        self._sets = [each for each, _ in here]
        self._layers, device = sets[0].layers, sets[0].flat.device
        scales = tuple(each.scale for each in self._sets)
        counts_G = torch.tensor([length for _, length in here], device=device)
        factors_G = torch.tensor([scale.factor for scale in scales], device=device)
        starts = accumulate((length for _, length in here), initial=0)
        segments = Segments(
            tokens=tuple(slice(start, start + length) for start, (_, length) in zip(starts, here, strict=False)),
            scales=scales,
            ends=counts_G.cumsum(0).to(torch.int32) if grouped and some else None,
            factors=factors_G.repeat_interleave(counts_G)[:, None],
        )
        rank = max(scale.rank for scale in scales)
        shapes = {
            name: [(len(here), *shape) for shape in layer.shapes(rank + -rank % EXPERT_RANK_STEP)]
            for name, layer in self._layers.items()
            if any(name in each.matrices for each in self._sets)
        }
        sizes = [math.prod(shape) for pair in shapes.values() for shape in pair]
        stacks = iter(torch.split(torch.zeros(sum(sizes), device=device), sizes))
        self._joined = {
            name: JoinedLayer(
                segments=segments,
                low=next(stacks).view(low).requires_grad_(),
                high=next(stacks).view(high).requires_grad_(),
                held=tuple(name in each.matrices for each in self._sets),
            )
            for name, (low, high) in shapes.items()
        }
        with torch.no_grad():
            own, copies = zip(*self._pairs(lambda stack: stack), strict=True)
            torch._foreach_copy_(copies, own)

    def __enter__(self) -> JoinedSets:
        for name, layer in self._layers.items():
            layer.hold(None)
            layer.joined = self._joined.get(name)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self._layers.values():
            layer.hold(None)

    def add_gradients(self) -> None:
        """Adds the passes' gradients to those of the sets."""
        for adapter_set in self._sets:
            adapter_set.open_gradient()
        if made := [(own.grad, part) for own, part in self._pairs(lambda stack: stack.grad)]:
            torch._foreach_add_(*zip(*made, strict=True))

    def _pairs(self, of: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for name, joined in self._joined.items():
            low_G, high_G = of(joined.low), of(joined.high)
            if low_G is None or high_G is None:
                continue
            highest = low_G.shape[1]
            for each, low, high in zip(self._sets, low_G.unbind(), high_G.unbind(), strict=True):
                if name in each.matrices:
                    rank, (own_low, own_high) = each.scale.rank, each.matrices[name]
                    yield own_low, low if rank == highest else low[:rank]
                    yield own_high, high if rank == highest else high[:, :rank]


def mounted_set(model: nn.Module) -> AdapterSet | None:
    return next((each.adapter_set for each in model.modules() if isinstance(each, AdapterHolder) and each.rank), None)


def _views(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    parts = zip(flat.split_with_sizes(list(map(_padded, shapes))), shapes, strict=True)
    return [part[: math.prod(shape)].view(shape) for part, shape in parts]


def _in_twos(matrices: Sequence[Matrix]) -> Iterator[tuple[Matrix, Matrix]]:
    return zip(matrices[::2], matrices[1::2], strict=True)


def _padded(shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) // ALIGNED) * ALIGNED
