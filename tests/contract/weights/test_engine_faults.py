"""Real engines under a real hub, over each transport, killed and damaged at every step: never torn weights, no hang.

The engine is a fixture: whatever keeps the Engine protocol over the same tiny model can take its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from group_senders import GroupSenders, Parcel, flipped
from inference_kit import line_of, make_model
from meshrl.client import WeightSyncClient
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.embedded.staging import tensor_bytes
from meshrl.inference.engine import Engine, HostVersion
from meshrl.models.state import hf_state
from meshrl.versions.layout import dtype_name
from meshrl.versions.progress import Progress
from meshrl.versions.uploads import Uploader
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import chunks_of, digest, root_of
from meshrl.wire.types import ActivationPolicy, AgentState, Chunk, Manifest, Transport, VersionState
from weight_mesh import Mesh

LIMIT_S = 60.0
AHEAD = (AgentState.PREPARED, AgentState.APPLYING)
State = dict[str, torch.Tensor]


def weights(version: int) -> State:
    return hf_state(make_model(100 + version))


def blake_root(state: Mapping[str, torch.Tensor]) -> bytes:
    return root_of((n, dtype_name(t.dtype), tuple(t.shape), digest(tensor_bytes(t))) for n, t in state.items())


class Gate:
    """Where an engine stops until it is let through."""

    def __init__(self) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        self.open.set()

    async def __call__(self) -> None:
        self.reached.set()
        await self.open.wait()

    def shut(self) -> None:
        self.reached.clear()
        self.open.clear()


class GatedEngine:
    """An engine that can be stopped before it takes a version's bytes and before it applies it."""

    def __init__(self, engine: Any) -> None:
        self.real = engine
        self.agent: Any = None
        self.fetching, self.applying = Gate(), Gate()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    async def stage(self, host: HostVersion) -> None:
        await self.fetching()
        await self.real.stage(host)

    async def receive(self, manifest: Manifest) -> None:
        await self.fetching()
        await self.real.receive(manifest)

    async def apply(self, version: int, root: bytes) -> None:
        await self.applying()
        await self.real.apply(version, root)


Start = Callable[[str], Awaitable[GatedEngine]]


@pytest.fixture
async def engine_under_test() -> AsyncIterator[Callable[[], Awaitable[Engine]]]:
    """Starts an engine over the tiny model, without a version; closes it after the test."""
    torch.set_num_threads(1)
    engines: list[EmbeddedEngine] = []

    async def start() -> Engine:
        engine = EmbeddedEngine(
            make_model(0), max_model_len=64, num_slots=2, kv_cache_bytes=2**22, seed=0, version=None
        )
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.close()


@dataclass(kw_only=True)
class Trainer:
    """Publishes whole versions over one transport, as a trainer of one epoch does."""

    mesh: Mesh
    transport: Transport
    epoch: int = 1
    senders: GroupSenders | None = None

    def __post_init__(self) -> None:
        self._client = self.mesh.client()
        self._sending: asyncio.Task[None] | None = None

    async def publish(self, version: int, *, damage: Callable[[Parcel], Parcel] = lambda parcel: parcel) -> None:
        """Seals a version and has it on its way to every engine."""
        if self.transport is not Transport.NCCL:
            await self.mesh.publisher(self.transport, epoch=self.epoch).publish(version, weights(version))
            return
        parcel = await self.seal(version)
        self.send(damage(parcel))

    async def seal(self, version: int) -> Parcel:
        await self.gather()
        assert self.senders is not None
        parcel = self.senders.parcel(version, weights(version), epoch=self.epoch)
        staged = await self._client.create_version(parcel.manifest)
        await self._client.seal_version(run_id="run", epoch=self.epoch, version=version, artifact_id=staged.artifact_id)
        return parcel

    async def gather(self) -> None:
        """Opens a group of all engines and meets them."""
        self.die()
        self.senders = GroupSenders(num_senders=2)
        opened = await self._client.open_group(
            run_id="run", epoch=self.epoch, store_address=self.senders.address, backend="gloo", num_senders=2,
            deadline_s=30.0,
        )  # fmt: skip
        await self.senders.meet(opened.generation, num_receivers=len(opened.members), deadline_s=30.0)

        def all_in() -> bool:
            known = self.mesh.hub.coordinator.pool.engines
            return all(known[m.engine_id].group_generation == opened.generation for m in opened.members)

        await self.mesh.until(all_in)

    async def copy(self, version: int) -> None:
        """Brings the hub the bytes of a version whose broadcast engines have missed."""
        if self.transport is not Transport.NCCL:
            return
        assert self.senders is not None
        state = weights(version)
        manifest = self.senders.parcel(version, state, epoch=self.epoch).manifest
        payload = np.zeros(manifest.payload_bytes, dtype=np.uint8)
        for tensor in manifest.tensors:
            payload[tensor.offset :][: tensor.num_bytes] = tensor_bytes(state[tensor.name])
        copy = replace(manifest, transport=Transport.STREAM, collective=None, chunks=chunks_of(payload.data, 4096))
        uploader = Uploader(self._client, Progress())
        staged = await uploader.stage(copy, payload)
        await uploader.seal(copy, staged.artifact_id, "", payload)

    def send(self, parcel: Parcel, senders: tuple[int, ...] = (0, 1)) -> None:
        assert self.senders is not None
        self._sending = asyncio.create_task(_send(self.senders, parcel, senders))

    async def activate(self, version: int, **more: Any) -> Any:
        return await self._client.activate_version(run_id="run", version=version, prepare_deadline_s=30.0, **more)

    def die(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        if self.senders is not None:
            self.senders.die()


async def _send(senders: GroupSenders, parcel: Parcel, chosen: tuple[int, ...]) -> None:
    try:
        await senders.send(parcel, senders=chosen)
    except MeshError as error:  # a receiver is gone: the trainer opens another group
        assert error.reason is Reason.GROUP_BROKEN  # noqa: PT017 (the test looks at what the engines serve)


@pytest.fixture(params=list(Transport), ids=lambda transport: transport.value)
def trainer(mesh: Mesh, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    made = Trainer(mesh=mesh, transport=request.param)
    yield made
    made.die()


@pytest.fixture
async def start(mesh: Mesh, engine_under_test: Any) -> AsyncIterator[Start]:
    """Starts engines with agents under the mesh; the test has a deadline."""

    async def begin(engine_id: str) -> GatedEngine:
        engine = GatedEngine(await engine_under_test())
        engine.agent = mesh.start_agent(engine_id, engine)
        engines = mesh.hub.coordinator.pool.engines
        await mesh.until(lambda: engine_id in engines and engines[engine_id].connected)
        return engine

    async with asyncio.timeout(LIMIT_S):
        yield begin


async def kill(mesh: Mesh, engine_id: str, engine: GatedEngine) -> None:
    """The engine and its agent are gone, in the middle of whatever they do."""
    dying = asyncio.create_task(mesh.kill_agent(engine_id))
    for task in list(engine.agent._tasks):  # a process that dies finishes nothing
        task.cancel()
    await dying
    await engine.real.close()
    await mesh.until(lambda: engine_id not in mesh.hub.coordinator.pool.engines)  # its lease is over


async def whole(engine: GatedEngine, *versions: int) -> bool:
    """Whether the bytes that are live are those of one of these versions; -1 is what the engine started with."""
    known = [blake_root(hf_state(make_model(0)) if version < 0 else weights(version)) for version in versions]
    return await engine.real.weights_root() in known


@pytest.mark.parametrize("moment", ["fetching", "prepared", "applying"])
async def test_engine_killed_at_any_moment_leaves_nothing_torn_and_the_next_one_catches_up(
    mesh: Mesh, start: Start, trainer: Trainer, moment: str
) -> None:
    engine = await start("e0")
    await trainer.publish(0)
    await trainer.activate(0)
    assert await whole(engine, 0)

    commit = None
    if moment in ("fetching", "applying"):
        getattr(engine, moment).shut()
    await trainer.publish(1)
    if moment == "fetching":
        await asyncio.wait_for(engine.fetching.reached.wait(), 60.0)
    else:
        await mesh.until(lambda: mesh.hub.list_engines("")[0].state is AgentState.PREPARED)
    if moment == "applying":
        commit = asyncio.create_task(trainer.activate(1))
        await asyncio.wait_for(engine.applying.reached.wait(), 60.0)
        assert engine.paused
    await kill(mesh, "e0", engine)
    assert await whole(engine, 0)

    again = await start("e0")
    await trainer.copy(1)
    await mesh.until(lambda: line_of(again.agent).state in AHEAD or again.version == 1)
    if commit is not None:  # decided: it goes forward with the engine that is there now
        assert (await commit).version.state is VersionState.COMMITTED
        assert again.version == 1
        assert await whole(again, 1)
    await trainer.publish(2)
    await trainer.activate(2)
    assert again.version == 2
    assert await whole(again, 2)
    assert [info.routable for info in await mesh.client().list_engines()] == [True]


async def test_sender_that_dies_in_the_middle_costs_one_version(mesh: Mesh, start: Start) -> None:
    engine, trainer = await start("e0"), Trainer(mesh=mesh, transport=Transport.NCCL)
    await trainer.publish(0)
    await trainer.activate(0)
    engine.fetching.shut()
    trainer.send(await trainer.seal(1), senders=(0,))  # its other rank never gets to its share
    await asyncio.wait_for(engine.fetching.reached.wait(), 60.0)
    trainer.die()
    engine.fetching.open.set()
    await mesh.until(lambda: any(one.last_fault is not None for one in mesh.hub.list_engines("")))
    (info,) = mesh.hub.list_engines("")
    assert (info.last_fault.reason, info.state, info.serving_version) == ("GROUP_BROKEN", AgentState.READY, 0)
    assert info.group_generation is None
    assert not engine.paused
    assert await whole(engine, 0)

    restarted = Trainer(mesh=mesh, transport=Transport.NCCL, epoch=2)  # it trains step 1 again
    await restarted.publish(1)
    await restarted.activate(1)
    assert engine.version == 1
    assert await whole(engine, 1)
    with pytest.raises(MeshError) as stale:
        await trainer.seal(2)
    assert stale.value.reason is Reason.STALE_EPOCH
    restarted.die()


async def test_damage_in_a_group_is_refused_and_the_copy_is_served_after_a_restart_of_the_hub(
    mesh: Mesh, start: Start
) -> None:
    engine, trainer = await start("e0"), Trainer(mesh=mesh, transport=Transport.NCCL)
    await trainer.publish(0)
    await trainer.activate(0)
    await trainer.publish(1, damage=flipped)
    await mesh.until(lambda: any(one.last_fault is not None for one in mesh.hub.list_engines("")))
    assert mesh.hub.list_engines("")[0].last_fault.reason == Reason.DIGEST_MISMATCH.name
    assert await whole(engine, 0)
    await trainer.copy(1)
    await mesh.restart_hub()
    await mesh.until_registered()
    late = await start("late")
    await trainer.activate(1)
    await mesh.until(lambda: late.version == 1)
    for each in (engine, late):
        assert await whole(each, 1)
    trainer.die()


@pytest.mark.parametrize("damage", ["lost", "doubled", "corrupted", "cut off"])
async def test_chunks_damaged_on_the_way_are_fetched_again(
    mesh: Mesh, start: Start, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    engine, trainer = await start("e0"), Trainer(mesh=mesh, transport=Transport.STREAM)
    fetch, calls = WeightSyncClient.fetch, []

    async def fetch_badly(
        client: WeightSyncClient, artifact_id: str, ranges: Any = (), *more: Any, **kept: Any
    ) -> AsyncIterator[Chunk]:
        calls.extend(ranges)
        number, count = len(calls), 0
        async for chunk in fetch(client, artifact_id, ranges, *more, **kept):
            count += 1
            if number == 1 and count == 3:
                if damage == "cut off":
                    return
                if damage == "doubled":
                    yield chunk
                if damage == "corrupted":
                    yield replace(chunk, data=bytes((chunk.data[0] ^ 1,)) + bytes(chunk.data[1:]))
                    continue
                if damage == "lost":
                    continue
            yield chunk

    monkeypatch.setattr(WeightSyncClient, "fetch", fetch_badly)
    await trainer.publish(0)
    await trainer.activate(0)
    assert await whole(engine, 0)
    manifest, _ = await mesh.client().get_manifest(version=0)
    arrived = 2 * manifest.chunks[0].length  # in the call that was damaged, which asked for more
    again = sum(length for _, length in calls) - manifest.num_bytes
    assert 0 < again <= calls[0][1] - arrived
    assert all(start >= arrived for start, _ in calls[1:])  # it went on behind what had come


async def test_slow_engine_of_a_gang_is_waited_for_and_all_resume_together(
    mesh: Mesh, start: Start, trainer: Trainer
) -> None:
    fast, slow = await start("fast"), await start("slow")
    await trainer.publish(0)
    await trainer.activate(0, policy=ActivationPolicy.GANG)
    slow.applying.shut()
    await trainer.publish(1)
    commit = asyncio.create_task(trainer.activate(1, policy=ActivationPolicy.GANG))
    await asyncio.wait_for(slow.applying.reached.wait(), 60.0)
    await mesh.until(lambda: fast.version == 1)
    await asyncio.sleep(0.2)
    assert fast.paused  # it holds the new weights and waits for the gang
    assert not commit.done()
    slow.applying.open.set()
    activation = await commit
    await mesh.until(lambda: not fast.paused and not slow.paused)
    reports = {report.engine_id: report.applied for report in activation.engines}
    assert reports.keys() == {"fast", "slow"}
    assert reports["fast"].pause_s >= 0.2
    assert await whole(fast, 1)
    assert await whole(slow, 1)


async def test_engine_of_a_gang_that_is_killed_does_not_hold_up_the_other(
    mesh: Mesh, start: Start, trainer: Trainer
) -> None:
    steady, killed = await start("steady"), await start("killed")
    await trainer.publish(0)
    await trainer.activate(0, policy=ActivationPolicy.GANG)
    killed.applying.shut()
    await trainer.publish(1)
    commit = asyncio.create_task(trainer.activate(1, policy=ActivationPolicy.GANG))
    await asyncio.wait_for(killed.applying.reached.wait(), 60.0)
    await kill(mesh, "killed", killed)
    assert (await commit).version.state is VersionState.COMMITTED
    await mesh.until(lambda: not steady.paused)
    assert await whole(steady, 1)
    assert await whole(killed, 0)


async def test_engine_killed_in_a_gang_that_has_applied_serves_what_was_decided_after_its_restart(
    mesh: Mesh, start: Start
) -> None:
    trainer = Trainer(mesh=mesh, transport=Transport.STREAM)
    ahead, slow = await start("ahead"), await start("slow")
    await trainer.publish(0)
    await trainer.activate(0, policy=ActivationPolicy.GANG)
    slow.applying.shut()
    await trainer.publish(1)
    commit = asyncio.create_task(trainer.activate(1, policy=ActivationPolicy.GANG))
    await mesh.until(lambda: ahead.version == 1)
    assert ahead.paused  # under the new weights, waiting for the other
    await kill(mesh, "ahead", ahead)
    again = await start("ahead")
    await mesh.until(lambda: again.version == 1)
    slow.applying.open.set()
    assert (await commit).version.state is VersionState.COMMITTED
    for engine in (again, slow):
        await mesh.until(lambda engine=engine: engine.version == 1 and not engine.paused)
        assert await whole(engine, 1)


async def test_weights_loaded_by_hand_are_noticed_and_the_hubs_version_comes_back(mesh: Mesh, start: Start) -> None:
    engine, trainer = await start("e0"), Trainer(mesh=mesh, transport=Transport.STREAM)
    await trainer.publish(0)
    await trainer.activate(0)
    await engine.stage(HostVersion(version=7, tensors=weights(7)))
    await engine.pause()
    await engine.apply(7, b"by hand")
    await engine.resume()
    await mesh.until(lambda: engine.version == 0)
    assert await whole(engine, 0)
