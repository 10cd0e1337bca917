"""Programs are killed in every state of a version: no torn weights, no orphans, and the next version is served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine_mesh import EngineClient, EngineMesh, Program, reference
from group_senders import GroupSenders
from meshrl.client import WeightSyncClient
from meshrl.wire.errors import MeshError
from meshrl.wire.types import ActivationPolicy, AgentRegistration, AgentReport, AgentState, Prepare, Transport
from plain_checks import check_greedy
from plain_model import logits_of, plain_state

PROMPT = [1, 2, 3]
pytestmark = pytest.mark.timeout(400)


async def check_served(mesh: EngineMesh) -> None:
    async with mesh.session() as session:
        choice = await EngineClient(session).greedy(PROMPT)
    assert choice["version_spans"] == [[0, 40, mesh.version]]
    check_greedy(mesh.kind, logits_of(reference(mesh), PROMPT, choice["token_ids"]), choice)


def kill(program: Program) -> None:
    """SIGKILL for the program alone; whatever it started must notice."""
    group = os.getpgid(program.process.pid)
    program.process.kill()
    program.process.wait(60.0)
    end_s = time.monotonic() + 30.0
    while _alive(group):
        assert time.monotonic() < end_s, "processes that the engine had started outlive it"
        time.sleep(0.1)


def _alive(group: int) -> bool:
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


def _children_of(parent: int, name: str) -> list[int]:
    """Process ids of its children of that name."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            called = (status.parent / "comm").read_text() + (status.parent / "cmdline").read_text()
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent and name in called:
                found.append(int(status.parent.name))
    return found


async def test_engine_killed_with_a_version_prepared_serves_it_after_its_restart(mesh: EngineMesh) -> None:
    """Killed itself, or by the death of the process that holds its model, where that is another one."""
    seed = mesh.other_seed()
    await mesh.seal(plain_state(seed, mesh.kind.dtype))
    await mesh.until(lambda engine: engine.state is AgentState.PREPARED)
    if mesh.kind.name == "embedded":
        kill(mesh.engine)
    else:
        await kill_model_process(mesh.engine)
    mesh.restart_engine()
    await mesh.activate(seed)
    await check_served(mesh)


async def kill_model_process(engine: Program) -> None:
    """SIGKILL for the process that holds the model; the program must end by itself."""
    (core,) = _children_of(engine.process.pid, "EngineCore")
    assert not _children_of(core, "Worker"), "its one worker waits in a busy loop of its own"
    os.kill(core, signal.SIGKILL)
    assert await asyncio.to_thread(engine.process.wait, 60) == 1


async def test_engine_killed_in_a_broadcast_takes_the_next_version_after_its_restart(mesh: EngineMesh) -> None:
    senders = GroupSenders(num_senders=2, device=mesh.kind.device)
    async with WeightSyncClient(mesh.hub_address) as hub:
        await senders.open(hub)
        parcel = senders.parcel(mesh.version + 1, plain_state(mesh.other_seed(), mesh.kind.dtype))
        staged = await hub.create_version(parcel.manifest)
        mesh.version += 1
        await hub.seal_version(run_id="run", epoch=1, version=mesh.version, artifact_id=staged.artifact_id)
    sending = asyncio.create_task(senders.send(parcel, senders=[0]))  # the second one never speaks
    await mesh.until(lambda engine: engine.state is AgentState.FETCHING)
    kill(mesh.engine)
    senders.die()
    await asyncio.wait({sending})
    assert isinstance(sending.exception(), MeshError)
    mesh.restart_engine()
    await mesh.publish(mesh.other_seed())
    await check_served(mesh)


@pytest.mark.parametrize("engine_kind", ["embedded"], indirect=True)  # hub and agent decide, whatever the engine
async def test_engine_killed_in_a_gang_that_has_applied_serves_what_was_decided_after_its_restart(
    mesh: EngineMesh,
) -> None:
    seed = mesh.other_seed()
    async with partner_that_never_applies(mesh):
        await mesh.seal(plain_state(seed, mesh.kind.dtype))
        gang = asyncio.create_task(mesh.activate(seed, policy=ActivationPolicy.GANG))
        await mesh.until(lambda engine: engine.state is AgentState.APPLYING and engine.serving_version == mesh.version)
        kill(mesh.engine)  # paused under the new weights, waiting for the partner
    gang.cancel()
    (outcome,) = await asyncio.gather(gang, return_exceptions=True)
    assert isinstance(outcome, (MeshError, asyncio.CancelledError)), "an engine of the gang has not applied"
    mesh.seed = seed
    mesh.restart_engine()
    await mesh.until(
        lambda engine: engine.url == mesh.url and engine.serving_version == mesh.version and engine.routable
    )
    await check_served(mesh)
    await mesh.publish(mesh.other_seed())
    await check_served(mesh)


@asynccontextmanager
async def partner_that_never_applies(mesh: EngineMesh) -> AsyncIterator[None]:
    """A second engine, as the hub sees it: it prepares what it is told to and does no more."""
    async with WeightSyncClient(mesh.hub_address) as hub:
        serves, _ = await hub.get_manifest("run")
        lease = await hub.register(
            AgentRegistration(
                engine_id="partner",
                url="http://127.0.0.1:1",
                transports=(Transport.FILESYSTEM,),
                layout_signature=serves.layout_signature,
                held_version=serves.version,
                held_root=serves.result_root,
            )
        )
        ready = AgentReport(lease_id=lease.lease_id, state=AgentState.READY, serving_version=serves.version)
        outbox: asyncio.Queue[AgentReport] = asyncio.Queue()
        outbox.put_nowait(ready)

        async def reports() -> AsyncIterator[AgentReport]:
            while True:
                yield await outbox.get()

        async def follow() -> None:
            async for command in hub.session(reports()):
                if isinstance(command, Prepare):
                    prepared = replace(ready, state=AgentState.PREPARED, target_version=command.version)
                    outbox.put_nowait(replace(prepared, target_artifact_id=command.artifact_id))

        following = asyncio.create_task(follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.wait({following})


async def test_hub_killed_with_a_version_sealed_decides_it_after_its_restart(mesh: EngineMesh) -> None:
    seed = mesh.other_seed()
    await mesh.seal(plain_state(seed, mesh.kind.dtype))
    await mesh.until(lambda engine: engine.state is AgentState.PREPARED)
    mesh.hub.process.send_signal(signal.SIGKILL)
    mesh.hub.process.wait(60.0)
    await check_still_served(mesh)
    host, _, port = mesh.hub_address.rpartition(":")
    config = {"server": {"host": host, "port": int(port)}, "output_dir": str(mesh.folder), "lease_s": 5.0}
    mesh.hub = Program(Path(sys.executable), "meshrl.weights.main", config, mesh.folder, "weights_again")
    await mesh.until(lambda engine: engine.state is AgentState.PREPARED)
    await mesh.activate(seed)
    await check_served(mesh)


def test_program_says_that_it_serves_to_whoever_started_it(mesh: EngineMesh) -> None:
    assert mesh.engine.ready.exists()


async def check_still_served(mesh: EngineMesh) -> None:
    """The version before the newest one, without a hub."""
    async with mesh.session() as session:
        choice = await EngineClient(session).greedy(PROMPT)
    assert choice["version_spans"] == [[0, 40, mesh.version - 1]]
    check_greedy(mesh.kind, logits_of(reference(mesh), PROMPT, choice["token_ids"]), choice)
