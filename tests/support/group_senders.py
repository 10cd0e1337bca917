"""The trainer's end of the nccl transport, for tests of engines: meets, broadcasts, damages, dies.

Over gloo; over NCCL where the engine under test is on a GPU, with each sender on one of the GPUs after it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import pytest
import torch

from meshrl.client import WeightSyncClient
from meshrl.versions.collective.broadcasting import Bytes, Sender
from meshrl.versions.collective.communicator import open_store, reach_store
from meshrl.versions.collective.digest import digest_bytes, sum128
from meshrl.versions.collective.plan import PublishPlan, rows_of
from meshrl.versions.deltas.base_rows import BaseRows
from meshrl.versions.deltas.codec import write_stream
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import Snapshot, take_snapshot
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError
from meshrl.wire.types import ChunkEntry, CollectivePlan, JoinGroup, Manifest, Transport

CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
STALL_S = 30.0  # as the receivers; long enough for engines that share a busy machine

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A version and what each sender sends of it: `deltas`, where there are any."""

    manifest: Manifest
    snapshots: tuple[Snapshot, ...]
    deltas: tuple[Bytes, ...] = ()


class GroupSenders:
    """Senders of one trainer. They share a store, as the ranks of a trainer do."""

    def __init__(self, *, num_senders: int = 1, bucket_bytes: int = 4096, device: str = "cpu") -> None:
        """`device` is the engine's kind of device. Skips the test when there is no GPU for every sender."""
        self.backend = BACKENDS[device]
        self._devices = [CPU] * num_senders
        if device == "cuda":
            if torch.cuda.device_count() <= num_senders:
                pytest.skip(f"{num_senders} sender(s) and an engine need {num_senders + 1} GPUs")
            self._devices = [torch.device("cuda", 1 + sender) for sender in range(num_senders)]
        self.plan = CollectivePlan(num_senders=num_senders, bucket_bytes=bucket_bytes)
        self._store = open_store("127.0.0.1", deadline_s=10.0)
        self.address = f"127.0.0.1:{self._store.port}"
        self._senders: list[Sender] = []
        self._idle: set[Sender] = set()  # every broadcast of theirs is over

    def group(self, generation: int, *, num_receivers: int = 1, first_receiver: int = 0) -> JoinGroup:
        """What a receiver is told."""
        return JoinGroup(
            generation=generation,
            store_address=self.address,
            backend=self.backend,
            num_senders=self.plan.num_senders,
            num_receivers=num_receivers,
            first_receiver=first_receiver,
            deadline_s=5.0,
        )

    async def open(self, hub: WeightSyncClient, *, num_receivers: int = 1, epoch: int = 1) -> None:
        """Forms a group with the hub's one engine; returns once both sides are in it."""
        opened = await hub.open_group(
            run_id="run",
            epoch=epoch,
            store_address=self.address,
            backend=self.backend,
            num_senders=self.plan.num_senders,
            deadline_s=30.0,
        )
        await self.meet(opened.generation, num_receivers=num_receivers, deadline_s=30.0)
        async with asyncio.timeout(60.0):
            while (await hub.list_engines())[0].group_generation != opened.generation:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)

    async def meet(self, generation: int, *, num_receivers: int = 1, deadline_s: float = 5.0) -> None:
        self.die()
        self._senders = await asyncio.gather(
            *[
                _on_thread(
                    lambda sender=sender: Sender.meet(
                        reach_store(self.address, deadline_s=60.0),
                        generation=generation,
                        backend=self.backend,
                        sender=sender,
                        num_receivers=num_receivers,
                        device=self._devices[sender],
                        deadline_s=deadline_s,
                    )
                )
                for sender in range(self.plan.num_senders)
            ]
        )
        self._idle = set(self._senders)

    async def send(self, parcel: Parcel, *, senders: Sequence[int] | None = None, stall_s: float = STALL_S) -> None:
        """Broadcasts it, or only some senders' share. Raises MeshError GROUP_BROKEN."""
        chosen = range(self.plan.num_senders) if senders is None else senders
        await asyncio.gather(*[self._send(one, parcel, stall_s) for one in chosen])

    def _send(self, number: int, parcel: Parcel, stall_s: float) -> asyncio.Future[None]:
        sender, snapshot = self._senders[number], parcel.snapshots[number]

        def send() -> None:
            self._idle.discard(sender)
            if parcel.deltas:
                sender.send_delta(parcel.deltas[number], snapshot.plan, stall_s=stall_s)
            else:
                sender.send(snapshot, stall_s=stall_s)
            self._idle.add(sender)

        return _on_thread(send)

    def die(self) -> None:
        """Breaks the group without a word.

        Connections close, as they do when a process ends, but for those with a broadcast under way: gloo waits for it.
        """
        while self._senders:
            sender = self._senders.pop()
            sender.abort()
            if sender in self._idle:
                _close(sender)
        self._idle = set()

    def parcel(
        self,
        version: int,
        state: Mapping[str, torch.Tensor],
        *,
        run_id: str = "run",
        epoch: int = 1,
        adapter: manifests.Adapter | None = None,
    ) -> Parcel:
        plans = manifests.plan_tensors(
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in state.items()
        )
        entries = tuple(replace(plan, digest=digest_bytes(sum128(state[plan.name].contiguous()))) for plan in plans)
        manifest = manifests.build_manifest(
            run_id=run_id,
            epoch=epoch,
            version=version,
            transport=Transport.NCCL,
            tensors=entries,
            chunks=(),
            collective=self.plan,
            adapter=adapter,
        )
        plan = PublishPlan(tensors=entries, collective=self.plan)
        shards = [self._shards(state, sender) for sender in range(self.plan.num_senders)]
        return Parcel(
            manifest=manifest,
            snapshots=tuple(take_snapshot(plan, own, rank, self._devices[rank]) for rank, own in enumerate(shards)),
        )

    def as_delta(self, parcel: Parcel, base: Parcel) -> Parcel:
        """The same version as what it changes of `base`."""
        deltas = []
        with ThreadPoolExecutor(2) as threads:
            for before, after in zip(base.snapshots, parcel.snapshots, strict=True):
                rows = BaseRows(threads, Progress())
                rows.encode(before, None, sparse=True)
                rows.keep(before, 0)
                rows.encode(after, 0, sparse=True)
                deltas.append(write_stream(rows.pieces))
        offsets = accumulate(map(len, deltas), initial=0)
        chunks = tuple(
            ChunkEntry(offset=offset, length=len(delta), digest=manifests.digest(delta.data))
            for offset, delta in zip(offsets, deltas, strict=False)
        )
        manifest = manifests.delta_manifest(base.manifest, parcel.manifest, chunks)
        return replace(parcel, manifest=manifest, deltas=tuple(deltas))

    def _shards(self, state: Mapping[str, torch.Tensor], sender: int) -> dict[str, torch.Tensor]:
        shards = {}
        for name, tensor in state.items():
            start, end = rows_of(tensor.shape[0], sender, self.plan.num_senders)
            shards[name] = tensor[start:end].to(self._devices[sender])
        return shards


def _close(sender: Sender) -> None:
    """With the last reference to its group gloo closes connections, as the kernel does for a process that ends."""
    communicator = sender._communicator
    if communicator._device.type == "cpu":
        communicator._outlived.detach()
        del communicator._group


def _on_thread(function: Callable[[], Result]) -> asyncio.Future[Result]:
    """On a daemon thread, which does not hold up the end of the tests while it blocks."""
    done: Future[Result] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(function())
        except MeshError as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(done)


def flipped(parcel: Parcel) -> Parcel:
    """The same version with one bit of the first sender's bytes changed on the way."""
    flat = parcel.snapshots[0].flat.clone()
    flat[len(flat) // 2] ^= 0x10
    return replace(parcel, snapshots=(replace(parcel.snapshots[0], flat=flat), *parcel.snapshots[1:]))
