"""Groups whose ranks learn what they hold: the next one is scattered, and one with a rank that knows nothing is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from meshrl.inference.engine import CollectiveSupport
from meshrl.versions.collective.broadcasting import Receiver
from meshrl.versions.placement import WeightPlacement, check_parts
from meshrl.wire.types import JoinGroup, Manifest
from placed_engine import PlacedRank, State, placement_of, state_of
from sender_ranks import TwoRanks
from weight_mesh import MemoryEngine, Mesh

CPU = torch.device("cpu")
RANKS = 2
DEADLINE_S = 30.0


class Divided(MemoryEngine):
    """An engine of two ranks, each with its receiver, which hold tensors as engines do."""

    def __init__(self) -> None:
        super().__init__(state_of(0))
        self.collective = CollectiveSupport(ranks=RANKS, backend="gloo")
        self.ranks = [PlacedRank(rank, RANKS) for rank in range(RANKS)]
        self.placements: list[WeightPlacement | None] = [None] * RANKS
        self.receivers: list[Receiver] = []
        self.received_bytes: list[list[int]] = []  # of each version, by rank
        self.breaks_off = False

    async def join_group(self, group: JoinGroup) -> None:
        await self.leave_group()
        join = [
            asyncio.to_thread(Receiver.join, group, index=rank, device=CPU, placement=placement)
            for rank, placement in enumerate(self.placements)
        ]
        self.receivers = list(await asyncio.gather(*join))

    async def leave_group(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.receivers = []

    async def receive(self, manifest: Manifest) -> None:
        received = await asyncio.gather(*(asyncio.to_thread(self._receive, manifest, rank) for rank in range(RANKS)))
        self.received_bytes.append([num_bytes for num_bytes, _ in received])
        if any(parts := [parts for _, parts in received]):
            check_parts(manifest, parts)
        self.shadow = (manifest.version, {})

    def _receive(self, manifest: Manifest, rank: int) -> tuple[int, object]:
        receiver, held = self.receivers[rank], self.ranks[rank]
        if self.breaks_off:
            receiver.abort()
        if receiver.knows_parts:
            times, digests = receiver.receive_held(manifest, held.parameters, stall_s=DEADLINE_S)
            return times.num_bytes, digests
        state: State = {}
        times = receiver.receive(
            manifest, lambda pairs: state.update((name, tensor.clone()) for name, tensor in pairs), stall_s=DEADLINE_S
        )
        held.load(state)
        placement = self.placements[rank] = placement_of(PlacedRank(rank, RANKS), state)
        receiver.offer(placement)
        return times.num_bytes, {}

    def computes_with(self, state: State) -> bool:
        for held in self.ranks:
            whole = PlacedRank(held.rank, RANKS)
            whole.load(state)
            if not all(torch.equal(tensor, held.parameters[name]) for name, tensor in whole.parameters.items()):
                return False
        return True


@asynccontextmanager
async def two_ranks(mesh: Mesh, deadline_s: float = DEADLINE_S) -> AsyncIterator[TwoRanks]:
    made = TwoRanks(state_of(0), mesh.client(), run_id="run", bucket_bytes=100, deadline_s=deadline_s)
    yield made
    await made.close()


async def scatters(trainer: TwoRanks, version: int, state: State) -> bool:
    """Publishes a version; returns whether it was scattered."""
    await trainer.publish(version, state)
    return trainer.shares[0].scatters


async def test_ranks_that_have_loaded_a_version_get_their_parts_of_the_next(mesh: Mesh) -> None:
    engine = Divided()
    mesh.start_agent("divided", engine)
    await mesh.until_registered()
    async with two_ranks(mesh) as trainer:
        for version in range(3):
            state = state_of(version + 1)
            assert await scatters(trainer, version, state) is (version > 0)
            await mesh.activate(version)
            assert engine.computes_with(state)
    whole = trainer.plan.num_bytes
    assert engine.received_bytes[0] == [whole, whole]
    for received in engine.received_bytes[1:]:
        assert all(whole / 2 <= num_bytes < 0.75 * whole for num_bytes in received)


async def test_a_group_with_a_new_engine_is_broadcast_to_and_then_scattered_only_where_that_pays(mesh: Mesh) -> None:
    engines = [Divided(), Divided()]
    mesh.start_agent("first", engines[0])
    await mesh.until_registered()
    async with two_ranks(mesh) as trainer:
        found = []
        for version in range(5):
            if version == 2:
                mesh.start_agent("second", engines[1])
                await mesh.until_registered(2)
            found.append(await scatters(trainer, version, state_of(version)))
            await mesh.activate(version)
            assert all(engine.computes_with(state_of(version)) for engine in engines[: 1 + (version >= 2)])
        assert found == [False, True, False, False, False]  # two senders would send all of it to each of two engines
        await mesh.kill_agent("second")
        await engines[1].leave_group()
        await mesh.until(lambda: "second" not in mesh.hub.coordinator.pool.engines)
        assert await scatters(trainer, 5, state_of(5))
        await mesh.activate(5)
        assert engines[0].computes_with(state_of(5))


async def test_after_a_scattered_version_that_broke_off_the_next_is_broadcast(mesh: Mesh) -> None:
    engine = Divided()
    mesh.start_agent("divided", engine)
    await mesh.until_registered()
    async with two_ranks(mesh, deadline_s=2.0) as trainer:
        for version in range(2):
            await trainer.publish(version, state_of(version))
            await mesh.activate(version)
        engine.breaks_off = True
        await trainer.publish(2, state_of(2))
        engine.breaks_off = False
        assert engine.version == 1
        for version in (3, 4):
            assert not await scatters(trainer, version, state_of(version))
            await mesh.activate(version)
            assert engine.computes_with(state_of(version))
    assert engine.received_bytes[-1] == [trainer.plan.num_bytes] * RANKS
