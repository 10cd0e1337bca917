"""The weights of one version as a rank captured them between two steps, in the published form.

The trainer's `Snapshotter` makes them on the training thread; the transports (`versions/transports`) read them on the
publishing threads meanwhile. Training may go on changing the weights: a snapshot shares no memory with them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.versions.collective.digest import sum128
from meshrl.versions.collective.plan import Bucket, buckets, sender_bytes
from meshrl.versions.dtypes import TORCH_DTYPES, dtype_name
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import plan_tensors
from meshrl.wire.types import CollectivePlan, TensorEntry


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """One sender's share of a version: its rows of each tensor, cast, in one buffer on the device.

    `flat` (sender's bytes,) uint8 has the pieces of `buckets` in the order in which they travel. `digests` (T, 2) int64
    are those of its own pieces, on the same device, where they were asked for: summed over the senders they are the
    tensors'. `ready` comes once a GPU has made the copy.
    """

    tensors: tuple[TensorEntry, ...]
    buckets: tuple[Bucket, ...]
    sender: int
    flat: torch.Tensor
    digests: torch.Tensor | None
    ready: torch.cuda.Event | None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(offset in the version's byte stream, length) of each piece, in the order of `flat`."""
        return [
            (self.tensors[piece.tensor].offset + piece.start, piece.end - piece.start)
            for bucket in self.buckets
            for piece in bucket.pieces[self.sender]
        ]


class GatheredWeights:
    """All weights of a version in the memory of one host, by name."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        """`state` must not change as long as this is used. Raises ValueError for a type that the contract lacks."""
        self._state = state
        self.tensors = plan_tensors((name, dtype_name(t.dtype), tuple(t.shape)) for name, t in state.items())

    def bytes_of(self, tensor: TensorEntry) -> memoryview:
        """A tensor's bytes in C order, without a copy when it is contiguous. Hosts are little-endian."""
        flat = self._state[tensor.name].detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """What rank 0's publisher is given of a version: all of it, or a word on what the sender ranks hold.

    `digests` (T, 2) int64 are the tensors' sums over all senders, for a broadcast; `parts_s`: seconds by part of the
    capture (snapshot, digest).
    """

    gathered: GatheredWeights | None = None
    digests: NDArray[np.int64] | None = None
    parts_s: Mapping[str, float] = field(default_factory=dict)


@torch.no_grad()
def take_snapshot(
    tensors: Sequence[TensorEntry],
    plan: CollectivePlan,
    shards: Mapping[str, torch.Tensor],
    sender: int,
    device: torch.device,
    reuse: torch.Tensor | None = None,
    *,
    with_digests: bool = True,
) -> Snapshot:
    """Casts this sender's rows (`shards`, by name, any floating-point type) into a flat buffer, and digests them.

    `tensors` need no digests yet. A sender without rows of a tensor need not have it in `shards`. `reuse` is the buffer
    of an earlier snapshot that nobody reads any more. Raises ValueError when there are not the rows that the plan says.
    """
    num_bytes = sender_bytes(tensors, plan, sender)
    fits = reuse is not None and reuse.numel() == num_bytes and reuse.device == device
    flat = reuse if fits and reuse is not None else torch.empty(num_bytes, dtype=torch.uint8, device=device)
    all_buckets = tuple(buckets(tensors, plan))
    copied: list[tuple[int, int, torch.Tensor]] = []  # (tensor, its first 16-bit word here, the bytes)
    at = 0
    for bucket in all_buckets:
        for piece in bucket.pieces[sender]:
            entry = tensors[piece.tensor]
            target = flat[at : at + piece.end - piece.start].view(TORCH_DTYPES[entry.dtype])
            source = shards[entry.name].detach()
            if source.numel() != target.numel():
                rows = math.prod(entry.shape[1:])
                expected = target.numel() // rows if rows else 0
                raise ValueError(f"sender {sender} has {tuple(source.shape)} of {entry.name}, expected {expected} rows")
            target.copy_(source.reshape(-1))
            copied.append((piece.tensor, piece.start // 2, target))
            at += piece.end - piece.start
    digests = torch.zeros((len(tensors), 2), dtype=torch.int64, device=device) if with_digests else None
    if digests is not None:
        for index, first_word, target in copied:
            digests[index] = sum128(target, first_word)
    ready = None
    if device.type == "cuda":
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
        ready.record(torch.cuda.current_stream(device))
    return Snapshot(tensors=tuple(tensors), buckets=all_buckets, sender=sender, flat=flat, digests=digests, ready=ready)


S = TypeVar("S")


class HeldSnapshot(Generic[S]):
    """The newest snapshot of a rank: laid down by its training thread, picked up by its publishing thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = -1
        self._snapshot: S | None = None

    def put(self, version: int, snapshot: S) -> None:
        with self._changed:
            self._version, self._snapshot = version, snapshot
            self._changed.notify_all()

    def drop(self) -> S | None:
        """Lets go of the snapshot, so that nobody picks it up any more, and returns it."""
        with self._changed:
            snapshot, self._snapshot = self._snapshot, None
            return snapshot

    def get(self, version: int, *, deadline_s: float) -> S:
        """The snapshot of a version, once it is there. Raises MeshError VERSION_SUPERSEDED or DEADLINE_PASSED."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: self._version > version or (self._version == version and self._snapshot is not None),
                deadline_s,
            )
            if self._version == version and self._snapshot is not None:
                return self._snapshot
        if found:
            raise MeshError(Reason.VERSION_SUPERSEDED, f"this rank already has version {self._version}")
        raise MeshError(Reason.DEADLINE_PASSED, f"this rank has no version {version} after {deadline_s:g} s")
