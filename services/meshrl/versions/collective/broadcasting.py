"""The two ends of a broadcast: a sender rank of the trainer sends its snapshot, a rank of an engine receives a version.

A snapshot (`versions.snapshot`) has its pieces in the order in which they are sent, so nothing is copied once more. A
receiver checks a version and passes on whole tensors. Used by the broadcast transport, the embedded engine's
`BroadcastReceiver` and vLLM's workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import Store

from meshrl.versions.collective.communicator import Broadcast, Communicator, reach_store
from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.collective.plan import Bucket, PublishPlan
from meshrl.versions.layout import TORCH_DTYPES
from meshrl.versions.snapshot import Snapshot
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import JoinGroup, Manifest, TensorEntry


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
        spans = [bucket.spans[self._sender] for bucket in snapshot.plan.buckets]
        works = [self._communicator.broadcast(snapshot.flat[begin:end]) for begin, end in spans if begin < end]
        for work in works:
            self._communicator.finish(work, stall_s)
            moved()

    def abort(self) -> None:
        """Ends the group, from any thread; a send under way raises GROUP_BROKEN."""
        self._communicator.abort()


Sink = Callable[[Sequence[tuple[str, torch.Tensor]]], None]


@dataclass(kw_only=True)
class ReceiveTimes:
    """Where the time of a broadcast went, in seconds: waiting for bytes, in the sink, checking digests."""

    wire_s: float = 0.0
    load_s: float = 0.0
    verify_s: float = 0.0


class Receiver:
    """One rank of an engine in a group. Blocking: use it off the event loop; `abort` may come from another thread."""

    def __init__(self, communicators: Sequence[Communicator], device: torch.device) -> None:
        self._communicators = communicators
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None, None]

    @classmethod
    def join(cls, group: JoinGroup, *, index: int, device: torch.device) -> Receiver:
        """Meets the senders as receiver `index` of its engine. Raises MeshError GROUP_BROKEN."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        end_s = time.monotonic() + group.deadline_s
        store = reach_store(group.store_address, deadline_s=group.deadline_s)
        communicators: list[Communicator] = []
        try:
            for sender in range(group.num_senders):
                communicators.append(  # noqa: PERF401 - those that met must be ended when a later one fails
                    Communicator(
                        store, generation=group.generation, sender=sender, rank=1 + group.first_receiver + index,
                        size=1 + group.num_receivers, backend=group.backend, device=device,
                        deadline_s=max(0.1, end_s - time.monotonic()),
                    )
                )  # fmt: skip
        except MeshError:
            for communicator in communicators:
                communicator.abort()
            raise
        return cls(communicators, device)

    @torch.no_grad()
    def receive(self, manifest: Manifest, sink: Sink, *, stall_s: float) -> ReceiveTimes:
        """Receives a version; `sink` gets the whole tensors of one bucket after the other, valid during the call only.

        On a GPU everything, the sink's work included, is on the current stream. Raises MeshError: GROUP_BROKEN when
        nothing moves for `stall_s` or the group was ended, DIGEST_MISMATCH naming the tensor, and the errors of the
        sink. The group outlives a wrong digest, and nothing else of these.
        """
        plan = manifest.collective
        if plan is None or plan.num_senders != len(self._communicators):
            raise MeshError(
                Reason.GROUP_BROKEN, f"the group has {len(self._communicators)} senders, the version {plan}"
            )
        times = ReceiveTimes()
        try:
            digests = self._take(PublishPlan(tensors=manifest.tensors, collective=plan), sink, stall_s, times)
        except BaseException:  # the sink's too: senders must not wait for a rank that is out of step
            self.abort()
            raise
        began_s = time.perf_counter()
        for entry, lanes in zip(manifest.tensors, torch.stack(digests).cpu(), strict=True):
            if digest_bytes(lanes) != entry.digest:
                text = f"tensor {entry.name!r} of version {manifest.version} is not what its manifest says"
                raise MeshError(Reason.DIGEST_MISMATCH, text)
        times.verify_s += time.perf_counter() - began_s
        return times

    def _take(self, plan: PublishPlan, sink: Sink, stall_s: float, times: ReceiveTimes) -> list[torch.Tensor]:
        digests: list[torch.Tensor] = []
        order = plan.buckets
        under_way = self._start(order[0], 0)
        for turn, bucket in enumerate(order):
            flat, works = under_way
            if turn + 1 < len(order):  # into the other buffer: the current stream is done with it by then
                under_way = self._start(order[turn + 1], turn + 1)
            began_s = time.perf_counter()
            for communicator, work in works:
                communicator.finish(work, stall_s)
            arrived_s = time.perf_counter()
            tensors = self._assemble(plan.tensors, bucket, flat)
            digests += [sum128(tensor) for _, tensor in tensors]
            verified_s = time.perf_counter()
            sink(tensors)
            times.wire_s += arrived_s - began_s
            times.verify_s += verified_s - arrived_s
            times.load_s += time.perf_counter() - verified_s
        return digests

    def _start(self, bucket: Bucket, turn: int) -> tuple[torch.Tensor, list[tuple[Communicator, Broadcast]]]:
        sizes = [end - begin for begin, end in bucket.spans]
        buffer = self._buffers[turn % 2]
        if buffer is None or buffer.numel() < sum(sizes):
            buffer = self._buffers[turn % 2] = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        works, at = [], 0
        for communicator, size in zip(self._communicators, sizes, strict=True):
            if size:
                works.append((communicator, communicator.broadcast(buffer[at : at + size])))
                at += size
        return buffer, works

    def _assemble(
        self, entries: Sequence[TensorEntry], bucket: Bucket, flat: torch.Tensor
    ) -> list[tuple[str, torch.Tensor]]:
        """The bucket's whole tensors: views of the buffer where one sender sent all of one, else put together."""
        parts: dict[int, dict[int, torch.Tensor]] = {index: {} for index in range(bucket.first, bucket.last)}
        at = 0
        for piece in (piece for pieces in bucket.pieces for piece in pieces):  # as they lie in `flat`
            size = piece.end - piece.start
            parts[piece.tensor][piece.start] = flat[at : at + size]
            at += size
        tensors = []
        for index, by_start in parts.items():
            entry = entries[index]
            found = [by_start[start] for start in sorted(by_start)]  # senders have their parts in any order
            whole = found[0] if len(found) == 1 else torch.cat(found) if found else flat[:0]
            if whole.storage_offset() % TORCH_DTYPES[entry.dtype].itemsize:
                whole = whole.clone()  # behind a piece of a narrower type
            tensors.append((entry.name, whole.view(TORCH_DTYPES[entry.dtype]).reshape(entry.shape)))
        return tensors

    def abort(self) -> None:
        """Ends the group, from any thread; a receive under way raises GROUP_BROKEN."""
        for communicator in self._communicators:
            communicator.abort()

    def close(self) -> None:
        self.abort()
        self._buffers = [None, None]
