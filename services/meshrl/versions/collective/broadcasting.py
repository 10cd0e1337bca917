"""The two ends of a group: a sender rank of the trainer sends its snapshot, a rank of an engine receives a version.

A receiver that does not know yet what its rank holds checks a version and passes on whole tensors. Later it copies the
parts that its rank holds to their places, and the ranks of an engine check them together. In a scattered group (see
`scatter`) it gets no more than those. Of a delta each sender broadcasts that of its own rows; a receiver joins them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore, Store

from meshrl.versions.collective import scatter
from meshrl.versions.collective.communicator import Communicator, Operation, reach_store
from meshrl.versions.collective.digest import digest_bytes, sum128_each
from meshrl.versions.collective.held_parts import HeldParts
from meshrl.versions.collective.plan import Bucket, PublishPlan
from meshrl.versions.collective.scatter import Message, Offer
from meshrl.versions.deltas.codec import DeltaError, joined, read_stream
from meshrl.versions.layout import TORCH_DTYPES
from meshrl.versions.placement import PartDigests, WeightPlacement
from meshrl.versions.snapshot import Snapshot
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import digest
from meshrl.wire.types import CollectivePlan, JoinGroup, Manifest, TensorEntry

Bytes = NDArray[np.uint8]
MOST_AHEAD = 8
"""Operations that a receiver's thread starts ahead of its GPU. With hundreds CUDA's queue may be full, and a start then
waits for senders without a deadline."""


class Sender:
    """Blocking: use it off the event loop and off the training thread."""

    def __init__(
        self, communicator: Communicator, *, sender: int, device: torch.device,
        messages: Sequence[Sequence[Message]] | None = None,
    ) -> None:  # fmt: skip
        """`messages`: of each bucket, that to each receiver; None: versions are broadcast."""
        self._communicator = communicator
        self._sender = sender
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch has none
        self._device = device
        self._messages = messages

    @classmethod
    def meet(
        cls, store: Store, *, generation: int, backend: str, sender: int, num_receivers: int, device: torch.device,
        deadline_s: float, plan: PublishPlan | None = None,
    ) -> Sender:  # fmt: skip
        """Meets the receivers at `store`; `plan`: of versions that may be scattered. Raises MeshError GROUP_BROKEN."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        group = PrefixStore(f"g{generation}", store)
        offers: list[Offer] | None = None

        def met() -> None:
            nonlocal offers
            if plan is not None and sender == 0 and (offers := scatter.scatter_offers(group, plan, num_receivers)):
                scatter.announce(group)

        communicator = Communicator(
            store, generation=generation, sender=sender, rank=0, size=1 + num_receivers, backend=backend,
            device=device, deadline_s=deadline_s, met=met,
        )  # fmt: skip
        try:
            if plan is not None and sender and scatter.is_scattered(group):
                offers = scatter.read_offers(group, plan, num_receivers)
        except RuntimeError as error:
            communicator.abort()
            raise MeshError(Reason.GROUP_BROKEN, f"group {generation}: the store is gone: {error}") from error
        if plan is None or offers is None:
            return cls(communicator, sender=sender, device=device)
        messages = [
            [scatter.message(plan.tensors, bucket, sender, offer.moves) for offer in offers] for bucket in plan.buckets
        ]
        return cls(communicator, sender=sender, device=device, messages=messages)

    @property
    def scatters(self) -> bool:
        return self._messages is not None

    def send(self, snapshot: Snapshot, *, stall_s: float, moved: Callable[[], object] = lambda: None) -> None:
        """Sends a snapshot; returns when all its bytes have left. `moved` is called for each part that has.

        Raises MeshError GROUP_BROKEN.
        """
        if snapshot.sender != self._sender:
            raise MeshError(Reason.INTERNAL, f"sender {self._sender} was given the snapshot of {snapshot.sender}")
        with self._beside_training():
            if self._messages is not None:
                self._scatter(snapshot, self._messages, stall_s, moved)
                return
            spans = [bucket.spans[self._sender] for bucket in snapshot.plan.buckets]
            self._broadcast(snapshot.flat, spans, stall_s, moved)

    def send_delta(
        self, delta: Bytes, plan: PublishPlan, *, stall_s: float, moved: Callable[[], object] = lambda: None
    ) -> None:
        """As `send`, the byte stream of this sender's delta, in parts of the plan's `bucket_bytes`."""
        flat = torch.from_numpy(delta.copy()).to(self._device)  # a delta is read-only, which tensors cannot be
        with self._beside_training():
            self._broadcast(flat, _parts(len(delta), plan.collective), stall_s, moved)

    @contextmanager
    def _beside_training(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._device)
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _broadcast(
        self, flat: torch.Tensor, spans: Sequence[tuple[int, int]], stall_s: float, moved: Callable[[], object]
    ) -> None:
        works = [self._communicator.broadcast(flat[begin:end]) for begin, end in spans if begin < end]
        for work in works:
            self._communicator.finish(work, stall_s)
            moved()

    def _scatter(
        self, snapshot: Snapshot, messages: Sequence[Sequence[Message]], stall_s: float, moved: Callable[[], object]
    ) -> None:
        spans = [bucket.spans[self._sender] for bucket in snapshot.plan.buckets]
        due = [each for each, (begin, end) in zip(messages, spans, strict=True) if begin < end]
        sizes = [[message.num_bytes for message in each] for each in due]
        room = max(map(sum, sizes), default=0)
        free = [torch.empty(room, dtype=torch.uint8, device=self._device) for _ in range(min(2, len(due)))]
        works: deque[tuple[Operation, torch.Tensor]] = deque()

        def finish_one() -> None:
            work, buffer = works.popleft()
            self._communicator.finish(work, stall_s)
            free.append(buffer)
            moved()

        for each, each_sizes in zip(due, sizes, strict=True):
            if not free:
                finish_one()
            buffer = free.pop()
            flat = buffer[: sum(each_sizes)]
            scatter.pack(each, snapshot.flat, flat)
            works.append((self._communicator.scatter(flat, each_sizes), buffer))
        while works:
            finish_one()

    def abort(self) -> None:
        """Ends the group, from any thread; a send under way raises GROUP_BROKEN."""
        self._communicator.abort()


Sink = Callable[[Sequence[tuple[str, torch.Tensor]]], None]


@dataclass(kw_only=True)
class ReceiveTimes:
    """Where the time of a version went: waiting for bytes, taking them, digesting them; and how many they were.

    Where a GPU's work is only started, `wire_s` has the wait for all of it.
    """

    wire_s: float = 0.0
    load_s: float = 0.0
    verify_s: float = 0.0
    num_bytes: int = 0


class Receiver:
    """One rank of an engine in a group. Blocking; `abort` may come from another thread."""

    def __init__(
        self, communicators: Sequence[Communicator], device: torch.device, group: JoinGroup, store: Store, index: int
    ) -> None:
        self._communicators = communicators
        self._device = device
        self._group, self._store, self._index = group, store, index
        self._buffers: list[torch.Tensor] = []
        self._placement: WeightPlacement | None = None  # of what this rank holds
        self._held: HeldParts | None = None
        self.is_scattered = False
        """Whether versions come in parts only, and not whole."""

    @classmethod
    def join(
        cls, group: JoinGroup, *, index: int, device: torch.device, placement: WeightPlacement | None = None
    ) -> Receiver:
        """Meets the senders as receiver `index` of its engine; `placement`: of the parts that this rank needs.

        Raises MeshError GROUP_BROKEN.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device)
        end_s = time.monotonic() + group.deadline_s
        store = reach_store(group.store_address, deadline_s=group.deadline_s)
        communicators: list[Communicator] = []
        joined = cls(communicators, device, group, PrefixStore(f"g{group.generation}", store), index)
        try:
            if placement is not None:
                joined.offer(placement)
            for sender in range(group.num_senders):
                communicators.append(  # noqa: PERF401 - those that met must be ended when a later one fails
                    Communicator(
                        store, generation=group.generation, sender=sender, rank=1 + group.first_receiver + index,
                        size=1 + group.num_receivers, backend=group.backend, device=device,
                        deadline_s=max(0.1, end_s - time.monotonic()),
                    )
                )  # fmt: skip
            joined.is_scattered = placement is not None and scatter.is_scattered(joined._store)
        except RuntimeError as error:  # the store is gone
            joined.abort()
            raise MeshError(Reason.GROUP_BROKEN, f"group {group.generation}: the store is gone: {error}") from error
        except MeshError:
            joined.abort()
            raise
        return joined

    def offer(self, placement: WeightPlacement) -> None:
        """Versions may come by `receive_held` from here on, and the senders are offered the parts of this rank, for the
        next group. Raises RuntimeError when the store is gone."""
        self._placement = placement
        if self._group.num_senders > 1:
            first = self._group.first_receiver
            scatter.write_offer(self._store, first + self._index, Offer(engine=first, moves=placement.moves))

    @property
    def knows_parts(self) -> bool:
        """Whether versions may come by `receive_held`."""
        return self._placement is not None

    @torch.no_grad()
    def receive(self, manifest: Manifest, sink: Sink, *, stall_s: float) -> ReceiveTimes:
        """Receives a version; `sink` gets the whole tensors of one bucket after the other, valid during the call only.

        GPU work, the sink's included, is on the current stream. Raises MeshError: GROUP_BROKEN when nothing moves for
        `stall_s` or the group was ended, DIGEST_MISMATCH naming the tensor, and errors of the sink. The group outlives
        only a wrong digest.
        """
        plan, times, digests = self._plan_of(manifest), ReceiveTimes(), list[torch.Tensor]()

        def take(index: int, flat: torch.Tensor) -> None:
            began_s = time.perf_counter()
            tensors = self._assemble(plan.tensors, plan.buckets[index], flat)
            digests.append(sum128_each([tensor for _, tensor in tensors], [0] * len(tensors)))
            verified_s = time.perf_counter()
            sink(tensors)
            times.verify_s += verified_s - began_s
            times.load_s += time.perf_counter() - verified_s

        sizes = [[end - begin for begin, end in bucket.spans] for bucket in plan.buckets]
        # A sink may wait for the device, which has no deadline: each bucket is here before it gets it.
        self._take(plan, sizes, self._room_for(sizes), Communicator.broadcast, take, stall_s, times, 0)
        began_s = time.perf_counter()
        for entry, lanes in zip(manifest.tensors, torch.cat(digests).cpu(), strict=True):
            if digest_bytes(lanes) != entry.digest:
                text = f"tensor {entry.name!r} of version {manifest.version} is not what its manifest says"
                raise MeshError(Reason.DIGEST_MISMATCH, text)
        times.verify_s += time.perf_counter() - began_s
        return times

    @torch.no_grad()
    def receive_delta(self, manifest: Manifest, *, stall_s: float) -> Bytes:
        """Receives the byte stream of a version's delta. Raises MeshError as `receive`."""
        plan = self._plan_of(manifest).collective
        buffers = [torch.empty(chunk.length, dtype=torch.uint8, device=self._device) for chunk in manifest.chunks]
        try:
            works = [
                (communicator, communicator.broadcast(buffer[begin:end]))
                for communicator, buffer in zip(self._communicators, buffers, strict=True)
                for begin, end in _parts(len(buffer), plan)
            ]
            for communicator, work in works:
                communicator.finish(work, stall_s)
        except BaseException:  # whatever it was, senders must not wait for a rank that is out of step
            self.abort()
            raise
        streams = [buffer.cpu().numpy() for buffer in buffers]
        for sender, (chunk, stream) in enumerate(zip(manifest.chunks, streams, strict=True)):
            if digest(stream.data) != chunk.digest:
                text = f"the delta to version {manifest.version} of sender {sender} is not what its manifest lists"
                raise MeshError(Reason.DIGEST_MISMATCH, text)
        try:
            return joined(map(read_stream, streams))
        except DeltaError as error:
            text = f"the delta to version {manifest.version} is refused: {error}"
            raise MeshError(Reason.DIGEST_MISMATCH, text) from error

    @torch.no_grad()
    def receive_held(
        self, manifest: Manifest, parameters: Mapping[str, torch.Tensor], *, stall_s: float
    ) -> tuple[ReceiveTimes, PartDigests]:
        """Receives the parts of a version that this rank holds into its parameters; returns their digests, unchecked.

        Streams and errors as of `receive`.
        """
        plan, times, placement, held = self._plan_of(manifest), ReceiveTimes(), self._placement, self._held
        assert placement is not None, "the parts of this rank are known"
        if held is None or not held.are_of(plan):
            held = self._held = HeldParts(plan, placement, scattered=self.is_scattered)
        buffers = self._room_for(held.sizes)

        def take(turn: int, flat: torch.Tensor) -> None:
            began_s = time.perf_counter()
            if turn == 0:  # while the next bucket is on its way
                held.open(buffers, parameters)
            held.take(turn, flat, parameters)
            times.load_s += time.perf_counter() - began_s

        how = Communicator.receive_piece if self.is_scattered else Communicator.broadcast
        most_ahead = MOST_AHEAD if self._device.type == "cuda" else 0
        self._take(held.plan, held.sizes, buffers, how, take, stall_s, times, most_ahead)
        began_s = time.perf_counter()
        digests = held.digests(parameters)
        times.verify_s += time.perf_counter() - began_s
        return times, digests

    def _plan_of(self, manifest: Manifest) -> PublishPlan:
        plan = manifest.collective
        if plan is None or plan.num_senders != len(self._communicators):
            raise MeshError(
                Reason.GROUP_BROKEN, f"the group has {len(self._communicators)} senders, the version {plan}"
            )
        return PublishPlan(tensors=manifest.tensors, collective=plan)

    def _take(
        self,
        plan: PublishPlan,
        sizes: Sequence[Sequence[int]],
        buffers: Sequence[torch.Tensor],
        begin: Callable[[Communicator, torch.Tensor], Operation],
        take: Callable[[int, torch.Tensor], None],
        stall_s: float,
        times: ReceiveTimes,
        most_ahead: int,
    ) -> None:
        """`sizes`: of each bucket, what each sender's `begin` fills of a buffer, of which there are two, in turns.

        `most_ahead`: operations on a GPU that may still run when `take` is called for what they bring. `take` is never
        called before the first bucket is here: it may load a kernel, which may wait for what runs on the device.
        """
        order, works = plan.buckets, deque[tuple[Communicator, Operation]]()

        def start(turn: int) -> tuple[torch.Tensor, list[tuple[Communicator, Operation]]]:
            buffer, begun, at = buffers[turn % 2], [], 0
            for communicator, size, (first, last) in zip(
                self._communicators, sizes[turn], order[turn].spans, strict=True
            ):
                if first < last:
                    begun.append((communicator, begin(communicator, buffer[at : at + size])))
                    at += size
            return buffer[:at], begun

        def finish(communicator: Communicator, work: Operation) -> None:
            began_s = time.perf_counter()
            communicator.finish(work, stall_s)
            times.wire_s += time.perf_counter() - began_s

        try:
            under_way = start(0)
            for turn in range(len(order)):
                flat, begun = under_way
                if turn + 1 < len(order):  # into the other buffer: the current stream is done with it by then
                    under_way = start(turn + 1)
                works += begun
                if most_ahead:
                    for _, work in begun:
                        work.order(self._device)
                while len(works) > (most_ahead if turn else 0):
                    finish(*works.popleft())
                times.num_bytes += len(flat)
                take(turn, flat)
            while works:
                finish(*works.popleft())
        except BaseException:  # the sink's too: senders must not wait for a rank that is out of step
            self.abort()
            raise

    def _room_for(self, sizes: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
        """Two buffers, for the buckets of even and of odd turns."""
        needed = [max(map(sum, sizes[turn::2]), default=0) for turn in range(2)]
        if [len(buffer) for buffer in self._buffers] != needed:
            self._buffers = []  # frees them first
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in needed]
        return self._buffers

    def _assemble(
        self, entries: Sequence[TensorEntry], bucket: Bucket, flat: torch.Tensor
    ) -> list[tuple[str, torch.Tensor]]:
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
        for communicator in self._communicators:
            communicator.abort()

    def close(self) -> None:
        self.abort()
        self._buffers = []


def _parts(num_bytes: int, plan: CollectivePlan) -> list[tuple[int, int]]:
    size = plan.bucket_bytes
    return [(begin, min(begin + size, num_bytes)) for begin in range(0, num_bytes, size)]
