"""A sender of the nccl transport: snapshots its rank's rows in the published form, digests them, and broadcasts them.

The snapshot is one flat buffer in the order in which pieces travel, so sending copies nothing more, and training may go
on changing the weights meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import Store

from meshrl.versions.collective.communicator import Communicator
from meshrl.versions.collective.digest import sum128
from meshrl.versions.collective.plan import Bucket, buckets, sender_bytes
from meshrl.versions.dtypes import TORCH_DTYPES
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import CollectivePlan, TensorEntry


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """What one sender sends of a version.

    `flat` (sender's bytes,) uint8 has its pieces in the order in which they travel; `digests` (T, 2) int64 are those of
    its own pieces, on the same device: summed over the senders they are the tensors'.
    """

    buckets: tuple[Bucket, ...]
    sender: int
    flat: torch.Tensor
    digests: torch.Tensor


@torch.no_grad()
def take_snapshot(
    tensors: Sequence[TensorEntry],
    plan: CollectivePlan,
    shards: Mapping[str, torch.Tensor],
    sender: int,
    device: torch.device,
    reuse: torch.Tensor | None = None,
) -> Snapshot:
    """Casts this sender's rows (`shards`, by name, any floating-point type) into a flat buffer, and digests them.

    `tensors` need no digests yet. A sender without rows of a tensor need not have it in `shards`. `reuse` is the buffer
    of an earlier snapshot that nobody sends any more. Raises ValueError when there are not the rows that the plan says.
    """
    num_bytes = sender_bytes(tensors, plan, sender)
    fits = reuse is not None and reuse.numel() == num_bytes and reuse.device == device
    flat = reuse if fits and reuse is not None else torch.empty(num_bytes, dtype=torch.uint8, device=device)
    digests = torch.zeros((len(tensors), 2), dtype=torch.int64, device=device)
    all_buckets = tuple(buckets(tensors, plan))
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    pieces: list[tuple[int, int, torch.Tensor]] = []
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
            targets.append(target)
            sources.append(source.reshape(-1))
            pieces.append((piece.tensor, piece.start // 2, target))
            at += piece.end - piece.start
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
    for index, first_word, target in pieces:
        digests[index] = sum128(target, first_word)
    return Snapshot(buckets=all_buckets, sender=sender, flat=flat, digests=digests)


class Sender:
    """One sender rank's end of a group. Blocking: use it off the event loop and off the training thread."""

    def __init__(self, communicator: Communicator, *, sender: int, device: torch.device) -> None:
        self._communicator = communicator
        self._sender = sender
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch has none
        self._device = device

    @classmethod
    def meet(
        cls, store: Store, *, generation: int, backend: str, sender: int, num_receivers: int, device: torch.device,
        deadline_s: float,
    ) -> Sender:  # fmt: skip
        """Meets the receivers at `store`. Raises MeshError GROUP_BROKEN when they do not all come in time."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        communicator = Communicator(
            store, generation=generation, sender=sender, rank=0, size=1 + num_receivers, backend=backend,
            device=device, deadline_s=deadline_s,
        )  # fmt: skip
        return cls(communicator, sender=sender, device=device)

    def send(self, snapshot: Snapshot, *, stall_s: float, moved: Callable[[], object] = lambda: None) -> None:
        """Broadcasts a snapshot; returns when all its bytes have left. Raises MeshError GROUP_BROKEN.

        `moved` is called for each part that has.
        """
        if snapshot.sender != self._sender:
            raise MeshError(Reason.INTERNAL, f"sender {self._sender} was given the snapshot of {snapshot.sender}")
        if self._stream is None:
            self._send(snapshot, stall_s, moved)
            return
        torch.cuda.set_device(self._device)
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._send(snapshot, stall_s, moved)

    def _send(self, snapshot: Snapshot, stall_s: float, moved: Callable[[], object]) -> None:
        at, works = 0, []
        for bucket in snapshot.buckets:
            size = bucket.num_bytes(self._sender)
            if size:
                works.append(self._communicator.broadcast(snapshot.flat[at : at + size]))
                at += size
        for work in works:
            self._communicator.finish(work, stall_s)
            moved()

    def abort(self) -> None:
        """Ends the group, from any thread; a send under way raises GROUP_BROKEN."""
        self._communicator.abort()
