"""Ranks of an engine that holds a small model as engines do, the tracing of where its tensors lie there, and versions
of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.collective.plan import PublishPlan, rows_of
from meshrl.versions.placement import PlacementTracer, WeightPlacement
from meshrl.versions.snapshot import Snapshot, take_snapshot
from meshrl.wire.manifest import build_manifest, plan_tensors
from meshrl.wire.types import CollectivePlan, Manifest, Transport

State = dict[str, torch.Tensor]
WHOLE = "norm"  # sender 0 has it
REORDERED = "experts"
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


def plan_for(state: State, num_senders: int, bucket_bytes: int = 1) -> PublishPlan:
    """The experts are divided in the reverse order of the senders where they divide evenly."""
    tensors = plan_tensors((n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in state.items())
    tensors = tuple(replace(entry, digest=digest_bytes(sum128(state[entry.name]))) for entry in tensors)
    names = [entry.name for entry in tensors]
    collective = CollectivePlan(
        num_senders=num_senders, bucket_bytes=bucket_bytes, whole_tensors=(names.index(WHOLE),),
        reordered_tensors=(names.index(REORDERED),), row_order=tuple(reversed(range(num_senders))),
    )  # fmt: skip
    return PublishPlan(tensors=tensors, collective=collective)


def manifest_of(plan: PublishPlan, version: int = 1) -> Manifest:
    return build_manifest(
        run_id="main", epoch=1, version=version, transport=Transport.NCCL, tensors=plan.tensors, chunks=(),
        collective=plan.collective,
    )  # fmt: skip


def snapshots_of(state: State, plan: PublishPlan) -> list[Snapshot]:
    senders = plan.collective.num_senders

    def rows(name: str, sender: int) -> torch.Tensor:
        part = plan.collective.row_order[sender] if name == REORDERED else sender
        start, end = rows_of(len(state[name]), part, senders)
        return state[name] if name == WHOLE else state[name][start:end]

    cpu = torch.device("cpu")
    return [take_snapshot(plan, {name: rows(name, one) for name in state}, one, cpu) for one in range(senders)]
