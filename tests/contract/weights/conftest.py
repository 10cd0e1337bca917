"""Fixtures of the hub's suite: a hub with whoever talks to it, an engine, and a transport."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.versions.transports import filesystem
from meshrl.wire.types import Transport
from weight_mesh import MemoryEngine, Mesh, make_state


@pytest.fixture(autouse=True)
def several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions come in several files, as large ones do."""
    monkeypatch.setattr(filesystem, "FILE_BYTES", 4096)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path)
    await mesh.start_hub()
    yield mesh
    await mesh.close()


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine(make_state(0))


@pytest.fixture(params=[Transport.FILESYSTEM, Transport.STREAM], ids=lambda transport: transport.value)
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param  # type: ignore[no-any-return] # pytest types params as Any
