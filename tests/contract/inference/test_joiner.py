"""An engine that joins a run gets its version while it starts, and applies it as soon as it serves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import slow_engine
from engine_mesh import EngineClient, EngineMesh
from meshrl.core.private_folders import SHM
from meshrl.wire.types import Transport
from polling import until
from served_engine import serving_engine
from unnamed_files import unnamed_files

JOINER = "joiner"
SLOW_MBPS = 0.05  # its 411 kB take a minute


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Engines come up once this file is there."""
    monkeypatch.setenv(slow_engine.GATE, str(tmp_path / "gate"))
    return tmp_path / "gate"


@pytest.fixture
async def mesh(start_mesh: Callable[..., EngineMesh], gate: Path) -> EngineMesh:
    """A version is decided, and the engine that served it is gone; the next one starts, on a slow link."""
    slowly = {"max_mbps": SLOW_MBPS}
    mesh = start_mesh("embedded", module="slow_engine", engine_id=JOINER, broadcast=slowly, waits=False)
    async with serving_engine(str(mesh.model_folder), mesh.hub_address, "first"):
        await mesh.publish(1, transport=Transport.STREAM)
    return mesh


def spooled(mesh: EngineMesh) -> set[int]:
    return unnamed_files(SHM, mesh.engine.process.pid)


async def served(mesh: EngineMesh) -> None:
    mesh.await_engine()
    async with mesh.session() as session:
        await EngineClient(session).until("version", 0, 60.0)
    # It computes what the publisher of the version computed.
    await until(lambda: "nats off" in mesh.engine.tail())
    await until(lambda: not spooled(mesh))


async def test_a_version_comes_before_the_engine_is_up_and_nothing_torn_is_used_after_a_kill(
    mesh: EngineMesh, gate: Path
) -> None:
    await until(lambda: bool(spooled(mesh)), 120.0)
    mesh.engine.process.send_signal(signal.SIGKILL)
    mesh.engine.process.wait(60.0)
    assert "came ahead" not in mesh.engine.tail()
    mesh.kind = replace(mesh.kind, broadcast={})
    mesh.begin_engine()
    await until(lambda: "came ahead" in mesh.engine.tail(), 120.0)
    assert "serving" not in mesh.engine.tail()
    assert len(spooled(mesh)) == 1
    lost = list((mesh.folder / "weight_hub" / "artifacts").rglob("payload"))
    for payload in lost:  # the engine needs no more of them
        os.truncate(payload, 0)
    assert lost
    await asyncio.to_thread(gate.touch)
    await served(mesh)
