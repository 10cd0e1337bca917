"""Versions travel from a publisher through a hub to engines, over both transports."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inference_kit import line_of
from meshrl.inference.agent import agent
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import ActivationPolicy, AgentState, Transport, VersionState
from weight_mesh import MemoryEngine, Mesh, make_state


async def test_engine_serves_each_activated_version_to_the_bit(
    mesh: Mesh, engine: MemoryEngine, transport: Transport
) -> None:
    mesh.start_agent("e0", engine)
    publisher = mesh.publisher(transport)
    for version in range(4):
        report = await publisher.publish(version, make_state(version + 1), "00-" + "a" * 32 + "-" + "b" * 16 + "-01")
        activation = await mesh.activate(version)
        assert activation.version.state is VersionState.COMMITTED
        assert activation.version.traceparent.startswith("00-aaaa")
        (applied,) = activation.engines
        assert (applied.engine_id, applied.applied.version, applied.applied.root) == ("e0", version, report.root)
        assert applied.applied.requests_kept == 3
        assert 0 < applied.applied.pause_s < activation.commit_s < activation.lag_s
        assert engine.version == version
        assert engine.holds(make_state(version + 1))
        assert await engine.weights_root() == report.root
    (info,) = await mesh.client().list_engines()
    assert (info.engine_id, info.state, info.serving_version, info.routable) == ("e0", AgentState.READY, 3, True)


async def test_engine_generates_while_it_prepares_and_pauses_only_to_swap_as_its_span_has_it(
    mesh: Mesh, engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("meshrl.inference.agent.agent.trace.get_tracer", provider.get_tracer)
    mesh.start_agent("e0", engine)
    await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    await mesh.until(lambda: engine.shadow is not None)
    assert engine.history == ["stage 0"]
    activation = await mesh.activate(0)
    assert engine.history == ["stage 0", "pause", "apply 0", "resume"]
    (attributes,) = [span.attributes for span in exporter.get_finished_spans() if span.name == "rl.sync.apply"]
    pause_s = activation.engines[0].applied.pause_s
    assert attributes is not None
    assert attributes["meshrl.pause_s"] == pytest.approx(pause_s, abs=1e-6)


async def test_engine_that_holds_the_same_root_acknowledges_without_a_transfer(
    mesh: Mesh, engine: MemoryEngine, transport: Transport
) -> None:
    mesh.start_agent("e0", engine)
    await mesh.publisher(transport).publish(0, make_state(0))
    activation = await mesh.activate(0)
    assert engine.history == ["adopt 0"]
    assert activation.engines[0].applied.pause_s == 0.0


async def test_retention_keeps_the_newest_two_and_deletes_the_bytes_of_older_ones(
    mesh: Mesh, engine: MemoryEngine, transport: Transport
) -> None:
    mesh.start_agent("e0", engine)
    publisher = mesh.publisher(transport)
    artifacts = []
    for version in range(4):
        artifacts.append((await publisher.publish(version, make_state(version + 1))).artifact_id)
        await mesh.activate(version)
    await mesh.until(lambda: len(list((mesh.folder / "weight_hub" / "artifacts").iterdir())) == 2)
    kept = {folder.name for folder in (mesh.folder / "weight_hub" / "artifacts").iterdir()}
    assert kept == set(artifacts[2:])
    if transport is Transport.FILESYSTEM:
        steps = mesh.folder / "broadcasts"  # deleted after the hub's own folder of the version
        await mesh.until(lambda: {folder.name for folder in steps.iterdir()} == {"step_2", "step_3"})
    with pytest.raises(MeshError, match="retired") as caught:
        _ = [chunk async for chunk in mesh.client().fetch(artifacts[0])]
    assert caught.value.reason is Reason.UNKNOWN_VERSION


async def test_late_engine_goes_straight_to_the_newest_committed_version(
    mesh: Mesh, engine: MemoryEngine, transport: Transport
) -> None:
    mesh.start_agent("e0", engine)
    publisher = mesh.publisher(transport)
    for version in range(3):
        await publisher.publish(version, make_state(version + 1))
        await mesh.activate(version)
    late = MemoryEngine(make_state(9))
    mesh.start_agent("late", late)
    await mesh.until(lambda: late.version == 2)
    assert late.history == ["stage 2", "pause", "apply 2", "resume"]
    await mesh.until(lambda: all(info.routable for info in mesh.hub.list_engines("")))


async def test_engine_that_needs_longer_than_the_trainer_serves_what_it_began_and_then_the_newest(
    mesh: Mesh, engine: MemoryEngine
) -> None:
    slow = MemoryEngine(make_state(5))
    may_stage = asyncio.Event()

    async def wait_for_it() -> None:
        await may_stage.wait()

    slow.before_stage = wait_for_it
    mesh.start_agent("fast", engine)
    slow_agent = mesh.start_agent("slow", slow)
    await mesh.until_registered(2)
    publisher, client = mesh.publisher(Transport.FILESYSTEM), mesh.client()
    for version in range(4):
        await publisher.publish(version, make_state(version + 1))
        await client.activate_version(run_id="run", version=version, min_ready=1, prepare_deadline_s=30.0)
        await mesh.until(lambda: (target := line_of(slow_agent).target) is not None and target.committed)
    may_stage.set()
    await mesh.until(lambda: slow.version == 3)
    assert [done for done in slow.history if done.startswith("apply")] == ["apply 0", "apply 3"]


async def test_gang_that_no_hub_resumes_goes_on_after_a_while(
    mesh: Mesh, engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "HOLD_S", 0.5)
    slow, never = MemoryEngine(make_state(5)), asyncio.Event()

    async def wait_for_it() -> None:
        await never.wait()

    slow.before_apply = wait_for_it
    mesh.start_agent("fast", engine)
    mesh.start_agent("slow", slow)
    await mesh.until_registered(2)
    await mesh.publisher(Transport.FILESYSTEM).publish(0, make_state(1))
    activation = asyncio.create_task(mesh.activate(0, policy=ActivationPolicy.GANG))
    await mesh.until(lambda: engine.version == 0)
    await mesh.kill_hub()
    await mesh.until(lambda: not engine.paused)
    assert engine.holds(make_state(1))
    never.set()
    activation.cancel()
    await asyncio.wait({activation})


async def test_rolling_commit_lets_each_engine_resume_on_its_own(mesh: Mesh, engine: MemoryEngine) -> None:
    slow = MemoryEngine(make_state(5))
    may_apply = asyncio.Event()

    async def wait_for_it() -> None:
        await may_apply.wait()

    slow.before_apply = wait_for_it
    mesh.start_agent("fast", engine)
    mesh.start_agent("slow", slow)
    await mesh.until_registered(2)
    await mesh.publisher(Transport.FILESYSTEM).publish(0, make_state(1))
    activation = asyncio.create_task(mesh.activate(0))
    await mesh.until(lambda: engine.version == 0 and not engine.paused)
    assert not activation.done()
    may_apply.set()
    assert len((await activation).engines) == 2


async def test_a_hub_that_drains_finishes_its_commit_and_takes_nothing_new(
    mesh: Mesh, engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, applying, real = asyncio.Event(), asyncio.Event(), engine.apply

    async def held(version: int, root: bytes) -> None:
        applying.set()
        await gate.wait()
        await real(version, root)

    monkeypatch.setattr(engine, "apply", held)
    mesh.start_agent("e0", engine)
    await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    activating = asyncio.create_task(mesh.activate(0))
    await applying.wait()
    draining = asyncio.create_task(mesh.hub.drain(None))
    late = mesh.publisher(Transport.STREAM, retry_for_s=0.1)
    for refused in (lambda: mesh.activate(0), lambda: late.publish(1, make_state(2))):
        with pytest.raises(MeshError) as error:
            await refused()
        assert error.value.reason is Reason.DRAINING
    assert not draining.done()
    gate.set()
    assert (await activating).version.state is VersionState.COMMITTED
    await asyncio.wait_for(draining, 30)
