"""The hub's shell: a defect ends it for everybody to hear, streams leave nothing behind, a stopped hub loses nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

from hub_rules import LAYOUT, manifest
from meshrl.core.config.shared import ServerConfig
from meshrl.core.program import READY_FILE
from meshrl.weights import main
from meshrl.weights.config import WeightsConfig
from meshrl.weights.coordinator.coordinator import Coordinator
from meshrl.weights.coordinator.line import LineLimits
from meshrl.weights.hub import Hub
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import (
    ActivationRequest,
    AgentFault,
    AgentRegistration,
    AgentReport,
    AgentState,
    Chunk,
    Manifest,
    Transport,
    VersionState,
)
from polling import until

REGISTRATION = AgentRegistration(
    engine_id="e", url="http://e", transports=(Transport.STREAM, Transport.NCCL), layout_signature=LAYOUT
)


class Time:
    """A clock that the test sets; it never stands still, as the real one does not."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
async def hub(tmp_path: Path, clock: Time) -> AsyncIterator[Hub]:
    limits = LineLimits(keep_versions=2, min_engines=1, commit_deadline_s=20.0)
    coordinator = Coordinator(limits, lease_s=10.0, max_chunk_bytes=2**20)
    hub = Hub(coordinator, spool_dir=tmp_path, max_chunk_bytes=2**20, verify_files="digests", monotonic=clock)
    await hub.start()
    yield hub
    await hub.stop()


async def no_chunks() -> AsyncIterator[Chunk]:
    return
    yield


async def seal(hub: Hub, made: Manifest) -> None:
    staged = await hub.create_version(made, no_chunks())
    await hub.seal_version(run_id="run", epoch=1, version=made.version, artifact_id=staged.artifact_id, traceparent="")


async def activate(hub: Hub, version: int) -> Any:
    return await hub.activate_version(ActivationRequest(run_id="run", version=version, prepare_deadline_s=20.0))


def defect(*arguments: Any) -> Any:
    raise RuntimeError("a defect")


async def refused(call: Any) -> None:
    with pytest.raises(MeshError, match="a defect") as caught:
        await asyncio.wait_for(call, 60.0)
    assert caught.value.reason is Reason.INTERNAL


async def test_defect_in_the_worker_ends_the_hub_and_every_call(hub: Hub) -> None:
    await seal(hub, manifest(1))
    waiting = asyncio.create_task(activate(hub, 1))
    await asyncio.sleep(0)
    hub._log._save = defect  # type: ignore[method-assign] # as if it had one
    await refused(seal(hub, manifest(2)))
    await refused(waiting)
    assert isinstance(await asyncio.wait_for(hub.failed, 60.0), RuntimeError)
    await refused(seal(hub, manifest(3)))
    await refused(hub.register(REGISTRATION))


async def test_defect_in_the_ticker_ends_the_hub_and_every_call(hub: Hub) -> None:
    await seal(hub, manifest(1))
    waiting = asyncio.create_task(activate(hub, 1))
    await asyncio.sleep(0)
    hub.coordinator.tick = defect  # type: ignore[method-assign] # as if it had one
    await refused(waiting)
    assert isinstance(await asyncio.wait_for(hub.failed, 60.0), RuntimeError)


async def test_seal_that_is_asked_for_again_is_not_answered_before_it_is_durable(hub: Hub) -> None:
    staged = await hub.create_version(manifest(1), no_chunks())
    append, writing, may_write = hub._log._save, threading.Event(), threading.Event()

    def slow_append(entry: Any) -> None:
        writing.set()
        may_write.wait(60.0)
        append(entry)

    hub._log._save = slow_append  # type: ignore[method-assign] # a slow disk
    asked = {"run_id": "run", "epoch": 1, "version": 1, "artifact_id": staged.artifact_id, "traceparent": ""}
    first = asyncio.create_task(hub.seal_version(**asked))
    assert await asyncio.to_thread(writing.wait, 15.0)
    again = asyncio.create_task(hub.seal_version(**asked))
    await asyncio.sleep(0.05)
    answered_early = again.done()
    may_write.set()
    sealed = await asyncio.wait_for(asyncio.gather(first, again), 60.0)
    assert [version.state for version in sealed] == [VersionState.SEALED] * 2
    assert not answered_early


async def test_program_ends_with_an_error_when_its_hub_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinator, "tick", defect)
    config = WeightsConfig(server=ServerConfig(port=0), output_dir=tmp_path)
    code = await asyncio.wait_for(main.serve(config, asyncio.Event(), trace.get_tracer("test")), 30.0)
    assert code == 1


async def test_sessions_that_break_off_leave_no_task_behind(hub: Hub) -> None:
    async def reports(lease_id: str) -> AsyncIterator[AgentReport]:
        yield AgentReport(lease_id=lease_id, state=AgentState.JOINING)
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    for _ in range(5):
        lease = await hub.register(REGISTRATION)
        session = hub.session(reports(lease.lease_id))
        listening = asyncio.ensure_future(anext(session))
        async with asyncio.timeout(60.0):
            while not hub.coordinator.pool.engines["e"].connected:  # noqa: ASYNC110 (state that has no event)
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
        listening.cancel()
        await asyncio.wait({listening})
    await until(lambda: not asyncio.all_tasks() - before)  # tasks of the hub, which end by themselves


async def test_stopped_hub_drops_no_engine_and_gives_up_no_version(hub: Hub, clock: Time) -> None:
    lease = await hub.register(REGISTRATION)
    await seal(hub, manifest(1, transport=Transport.NCCL))
    waiting = asyncio.create_task(activate(hub, 1))
    await asyncio.sleep(0.05)
    clock.now_s += 40.0  # SIGSTOP, then SIGCONT
    await asyncio.wait_for(hub._heard.next(), 60.0)  # it has looked at the time
    assert not waiting.done()
    (engine,) = hub.list_engines("")
    assert engine.engine_id == "e"
    hub.coordinator.report(AgentReport(lease_id=lease.lease_id, state=AgentState.JOINING), hub._now())
    assert hub.coordinator.line("run").records["run", 1, 1].state is VersionState.SEALED
    waiting.cancel()
    for _ in range(6):  # an engine that is silent while the hub runs is dropped as before
        clock.now_s += 1.9  # a longer gap is a stop
        await asyncio.wait_for(hub._heard.next(), 60.0)
    assert hub.list_engines("") == ()


async def test_wait_for_a_version_says_what_an_engine_has_against_it(hub: Hub) -> None:
    leases = [await hub.register(replace(REGISTRATION, engine_id=name)) for name in ("a", "b")]
    await seal(hub, manifest(1))
    waiting = asyncio.create_task(
        hub.activate_version(ActivationRequest(run_id="run", version=1, min_ready=1, prepare_deadline_s=20.0))
    )
    await asyncio.sleep(0.05)
    fault = AgentFault(reason="LAYOUT_MISMATCH", message="it does not fit the served model")
    artifact_id = hub.coordinator.line("run").records["run", 1, 1].artifact_id
    report = AgentReport(
        lease_id=leases[0].lease_id,
        state=AgentState.READY,
        target_version=1,
        target_artifact_id=artifact_id,
        fault=fault,
    )
    hub.coordinator.report(report, hub._now())
    (said,) = hub._waits.look(0.0)
    assert said.what == "version 1 at a, which refused it (LAYOUT_MISMATCH: it does not fit the served model); b"
    waiting.cancel()


async def test_hub_says_that_it_serves_to_whoever_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(READY_FILE, str(tmp_path / "ready"))
    stop = asyncio.Event()
    config = WeightsConfig(server=ServerConfig(port=0), output_dir=tmp_path)
    running = asyncio.create_task(main.serve(config, stop, trace.NoOpTracer()))
    await until((tmp_path / "ready").exists)
    stop.set()
    assert await asyncio.wait_for(running, 60.0) == 0
