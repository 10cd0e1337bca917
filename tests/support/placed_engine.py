"""Ranks of an engine that holds a small model as engines do, and the tracing of where its tensors lie there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshrl.versions.placement import PlacementTracer, WeightPlacement

State = dict[str, torch.Tensor]
SHAPES = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "up": (10, 6), "down": (6, 10), "embed": (7, 6), "experts": (4, 6, 8)}


def state_of(seed: int) -> State:
    source = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=source).bfloat16() for name, shape in SHAPES.items()}
    return {**made, "norm": torch.randn(6, generator=source)}


class PlacedRank:
    """A rank of an engine: q, k and v in one parameter, columns of `down`, `embed` with a row of padding, and experts
    transposed."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks

        def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.full(shape, 7, dtype=dtype)

        self.parameters = {
            "qkv": made(16 // ranks, 6), "up": made(10 // ranks, 6), "down": made(6, 10 // ranks),
            "embed": made(8 // ranks, 6), "experts": made(4, 8, 6 // ranks), "norm": made(6, dtype=torch.float32),
        }  # fmt: skip

    def load(self, state: State, scale: float = 1.0) -> None:
        def part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
            size = tensor.shape[dim] // self.ranks
            return tensor.narrow(dim, self.rank * size, size)

        at = 0
        for name in ("q", "k", "v"):
            rows = part(state[name], 0)
            self.parameters["qkv"][at : at + len(rows)].copy_(rows)
            at += len(rows)
        self.parameters["up"].copy_(part(state["up"], 0))
        self.parameters["down"].data.copy_(part(state["down"], 1))
        embed, size = self.parameters["embed"], 8 // self.ranks
        rows = state["embed"][self.rank * size : (self.rank + 1) * size]
        embed[: len(rows)] = rows
        embed[len(rows) :].fill_(0)
        for expert in range(4):
            self.parameters["experts"][expert].copy_(part(state["experts"][expert], 0).t())
        self.parameters["norm"].copy_(state["norm"] if scale == 1.0 else state["norm"] * scale)


def traced(
    engine: PlacedRank, state: State, load: Callable[[PlacedRank, State], None] = PlacedRank.load
) -> PlacementTracer:
    tracer = PlacementTracer(engine.parameters)
    with tracer.sources(list(state.items())):
        load(engine, state)
    return tracer


def placement_of(engine: PlacedRank, state: State) -> WeightPlacement:
    tracer = traced(engine, state)
    found = tracer.placement()
    assert found is not None, tracer.obstacle
    return found
