"""Programs are killed with a version on its way: no torn weights, no orphans, and the version is served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from engine_mesh import EngineClient, EngineMesh, Program, reference
from meshrl.wire.types import AgentState
from plain_checks import check_greedy
from plain_model import logits_of, plain_state

PROMPT = [1, 2, 3]
pytestmark = pytest.mark.timeout(400)


async def check_served(mesh: EngineMesh) -> None:
    async with mesh.session() as session:
        choice = await EngineClient(session).greedy(PROMPT)
    assert choice["version_spans"] == [[0, 40, mesh.version]]
    check_greedy(mesh.kind, logits_of(reference(mesh), PROMPT, choice["token_ids"]), choice)


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
        mesh.engine.kill()
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
