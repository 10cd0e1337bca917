"""The weights of one version as a rank of the trainer copied them between two steps, in the published form.

Snapshots are made on the training thread and read on the publishing threads. They share no memory with live weights.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from meshrl.versions.collective.plan import PublishPlan
from meshrl.versions.layout import TORCH_DTYPES, dtype_name
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import plan_tensors
from meshrl.wire.types import TensorEntry, VersionProbe


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """One sender's share of a version: `flat` (bytes,) uint8 has its pieces of the plan, in the order they are sent.

    `ready` is the event after which a GPU has made the copy; None on a CPU.
    """

    plan: PublishPlan
    sender: int
    flat: torch.Tensor
    ready: torch.cuda.Event | None

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        return self.plan.tensors

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(offset, length) in the version's byte stream of each piece."""
        pieces = self.plan.pieces(self.sender)
        return [(self.tensors[piece.tensor].offset + piece.start, piece.end - piece.start) for piece in pieces]


class SideStream:
    """A CUDA stream beside training, one for all versions, since torch keeps memory by stream."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def reading(self, snapshot: Snapshot, *, wait: bool = True) -> Iterator[None]:
        """Waits until a snapshot is made; GPU work inside is on this stream and, unless `wait` is off, done at the
        end."""
        if snapshot.ready is None:
            yield
            return
        device = snapshot.flat.device
        snapshot.ready.synchronize()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has none
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            yield
            if wait:
                self._stream.synchronize()


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """A capture, for rank 0's publisher.

    `gathered`: all weights by name, unchanged until they are published; None where each sender rank holds its own
    snapshot. `parts_s`: seconds by part of the capture. `probe` waits for the version's probe.
    """

    gathered: Mapping[str, torch.Tensor] | None = None
    parts_s: Mapping[str, float] = field(default_factory=dict)
    probe: Callable[[], VersionProbe] | None = None


@torch.no_grad()
def take_snapshot(
    plan: PublishPlan,
    shards: Mapping[str, torch.Tensor],
    sender: int,
    device: torch.device,
    reuse: torch.Tensor | None = None,
) -> Snapshot:
    """Casts this sender's rows (`shards`, by name, any floating-point type) into a flat buffer.

    `reuse` is the buffer of an earlier snapshot that is not read any more. Raises ValueError if the rows are not those
    of the plan.
    """
    num_bytes = plan.sender_bytes(sender)
    fits = reuse is not None and reuse.numel() == num_bytes and reuse.device == device
    flat = reuse if fits and reuse is not None else torch.empty(num_bytes, dtype=torch.uint8, device=device)
    for piece in plan.pieces(sender):
        entry = plan.tensors[piece.tensor]
        target, source = flat[piece.place].view(TORCH_DTYPES[entry.dtype]), shards[entry.name].detach()
        if source.numel() != target.numel():
            rows = math.prod(entry.shape[1:])
            expected = target.numel() // rows if rows else 0
            raise ValueError(f"sender {sender} has {tuple(source.shape)} of {entry.name}, expected {expected} rows")
        target.copy_(source.reshape(-1))
    ready = None
    if device.type == "cuda":
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
        ready.record(torch.cuda.current_stream(device))
    return Snapshot(plan=plan, sender=sender, flat=flat, ready=ready)


def whole_snapshot(state: Mapping[str, torch.Tensor], reuse: torch.Tensor | None = None) -> Snapshot:
    """As `take_snapshot`, in host memory, for an only sender. Raises ValueError for a type that the contract lacks."""
    tensors = plan_tensors((name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in state.items())
    plan = PublishPlan(tensors=tensors)
    return take_snapshot(plan, state, 0, torch.device("cpu"), reuse=reuse)


class HeldSnapshot:
    """The newest snapshot of a rank, between its training and its publishing thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = -1
        self._snapshot: Snapshot | None = None

    def put(self, version: int, snapshot: Snapshot) -> None:
        with self._changed:
            self._version, self._snapshot = version, snapshot
            self._changed.notify_all()

    def drop(self) -> Snapshot | None:
        with self._changed:
            snapshot, self._snapshot = self._snapshot, None
            return snapshot

    def get(self, version: int, *, deadline_s: float) -> Snapshot:
        """Waits for the snapshot of a version. Raises MeshError VERSION_SUPERSEDED or DEADLINE_PASSED."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: self._version > version or (self._version == version and self._snapshot is not None), deadline_s
            )
            if self._version == version and self._snapshot is not None:
                return self._snapshot
        if found:
            raise MeshError(Reason.VERSION_SUPERSEDED, f"this rank already has version {self._version}")
        raise MeshError(Reason.DEADLINE_PASSED, f"this rank has no version {version} after {deadline_s:g} s")
