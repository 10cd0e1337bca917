"""SleepEngines over a real hub and real agents: idle engines give memory back, and whoever needs them wakes them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
import torch

from meshrl.client import WeightSyncClient
from meshrl.inference.engine import GenerateRequest, SamplingParams
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AgentState, EngineInfo, Transport
from weight_mesh import MemoryEngine, Mesh, make_state

REQUEST = GenerateRequest(request_id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=1))


@pytest.fixture
async def serving(mesh: Mesh, engine: MemoryEngine) -> WeightSyncClient:
    """A client of a hub whose one engine, "e0", serves version 0 and has nothing to do."""
    engine.can_sleep, engine.in_flight = True, 0
    mesh.start_agent("e0", engine)
    await mesh.until_registered()
    client: WeightSyncClient = mesh.client()
    await publish(mesh, client, 0, make_state(0))
    engine.history.clear()
    return client


async def publish(mesh: Mesh, client: WeightSyncClient, version: int, weights: Mapping[str, torch.Tensor]) -> None:
    await mesh.publisher(Transport.STREAM).publish(version, weights)
    await client.activate_version(run_id="run", version=version, prepare_deadline_s=30.0)


async def counts(client: WeightSyncClient, deadline_s: float = 30.0, pool: str = "") -> tuple[int, int]:
    outcome = await client.sleep_engines(pool, deadline_s=deadline_s)
    assert 0.0 <= outcome.seconds < deadline_s + 30.0
    return outcome.asleep, outcome.awake


async def listed(client: WeightSyncClient) -> EngineInfo:
    (engine,) = await client.list_engines()
    return engine


async def test_idle_engine_sleeps_once_and_stays_routable(engine: MemoryEngine, serving: WeightSyncClient) -> None:
    before = await listed(serving)
    assert (before.can_sleep, before.sleeping, before.routable) == (True, False, True)
    assert await counts(serving) == (1, 0)
    after = await listed(serving)
    assert (after.sleeping, after.routable, after.state, after.serving_version) == (True, True, AgentState.READY, 0)
    assert await counts(serving) == (1, 0)
    assert await asyncio.gather(counts(serving), counts(serving)) == [(1, 0), (1, 0)]
    assert engine.history == ["sleep"]
    with pytest.raises(MeshError, match="deadline_s"):  # a wait without an end
        await serving.sleep_engines(deadline_s=0.0)


async def test_next_version_wakes_the_engine_and_is_served(
    mesh: Mesh, engine: MemoryEngine, serving: WeightSyncClient
) -> None:
    assert await counts(serving) == (1, 0)
    await publish(mesh, serving, 1, make_state(1))
    assert engine.history == ["sleep", "wake", "stage 1", "pause", "apply 1", "resume"]
    assert engine.holds(make_state(1))
    assert not (await listed(serving)).sleeping


async def test_request_wakes_the_engine_and_the_hub_hears_of_it(
    mesh: Mesh, engine: MemoryEngine, serving: WeightSyncClient
) -> None:
    assert await counts(serving) == (1, 0)
    (chunk,) = [chunk async for chunk in engine.generate(REQUEST)]
    assert chunk.version_spans[0].version == 0
    assert engine.history == ["sleep", "wake"]
    await mesh.until(lambda: not mesh.hub.coordinator.pool.engines["e0"].sleeping)
    assert await counts(serving) == (1, 0)
    assert engine.history == ["sleep", "wake", "sleep"]


async def test_engine_with_requests_in_flight_stays_awake_and_one_that_was_woken_is_not_taken_to_sleep(
    engine: MemoryEngine, serving: WeightSyncClient
) -> None:
    engine.in_flight = 2
    assert await counts(serving) == (0, 1)
    assert engine.history == []
    engine.in_flight = 0
    assert await counts(serving) == (1, 0)
    engine.in_flight = 1
    await engine.wake()
    assert await counts(serving) == (0, 1)  # whatever its last report said
    assert not (await listed(serving)).sleeping


async def test_engine_that_cannot_sleep_is_counted_and_not_asked(
    mesh: Mesh, engine: MemoryEngine, serving: WeightSyncClient
) -> None:
    mesh.start_agent("e1", MemoryEngine(make_state(0)))
    await mesh.until_registered(2)
    assert await counts(serving) == (1, 1)
    assert await counts(serving, pool="elsewhere") == (0, 0)
    assert [e.can_sleep for e in await serving.list_engines()] == [True, False]


async def test_engine_with_a_version_under_way_stays_awake(
    mesh: Mesh, engine: MemoryEngine, serving: WeightSyncClient
) -> None:
    await mesh.publisher(Transport.STREAM).publish(1, make_state(1))
    await mesh.until(lambda: mesh.hub.coordinator.pool.engines["e0"].on("run").prepared is not None)
    assert await counts(serving) == (0, 1)
    await serving.activate_version(run_id="run", version=1, prepare_deadline_s=30.0)
    assert await counts(serving) == (1, 0)


async def test_hub_that_restarts_is_told_anew_and_numbers_from_before_count_for_nothing(
    mesh: Mesh, engine: MemoryEngine, serving: WeightSyncClient
) -> None:
    assert await counts(serving) == (1, 0)
    await mesh.restart_hub()
    await mesh.until_registered()
    assert (await listed(serving)).sleeping
    engine.in_flight = 1
    await engine.wake()
    assert await counts(serving) == (0, 1)


async def test_engine_that_hangs_costs_the_deadline_and_then_itself(
    mesh: Mesh, engine: MemoryEngine, serving: WeightSyncClient
) -> None:
    async def hang() -> None:
        await asyncio.sleep(3600.0)

    engine.before_sleep, engine.sleeper._deadline_s = hang, 1.0
    assert await counts(serving, deadline_s=0.3) == (0, 1)
    await mesh.publisher(Transport.STREAM).publish(1, make_state(1))
    with pytest.raises(MeshError, match="falling asleep took longer than 1 s") as refused:
        await serving.activate_version(run_id="run", version=1, prepare_deadline_s=30.0)
    assert refused.value.reason is Reason.ENGINES_NOT_READY
    with pytest.raises(MeshError, match="start the engine anew"):
        _ = [chunk async for chunk in engine.generate(REQUEST)]
    fault = (await listed(serving)).last_fault
    assert fault is not None
    assert fault.reason == "ENGINE_FAILED"


async def test_sleep_that_fails_is_answered_at_once_with_its_reason(
    engine: MemoryEngine, serving: WeightSyncClient
) -> None:
    async def fail() -> None:
        raise RuntimeError("out of host memory")

    engine.before_sleep = fail
    assert await counts(serving) == (0, 1)
    fault = (await listed(serving)).last_fault
    assert fault is not None
    assert fault.message.startswith("falling asleep failed: RuntimeError('out of host memory')")
