"""A hub or an engine without room for a version says what to do in a sentence, and once there is room it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Transport
from small_disk import fill, mounted


@pytest.fixture
def tracebacks() -> Iterator[list[str]]:
    """Every error that is logged with a traceback."""
    found: list[str] = []
    handler = logger.add(found.append, level="ERROR", format="{message}\n{exception}", filter=_has_traceback)
    yield found
    logger.remove(handler)


def _has_traceback(record: Any) -> bool:
    return record["exception"] is not None


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Path]:
    """The folder of the versions that are streamed to the hub, a disk of its own; to be asked for before `mesh`."""
    with mounted(tmp_path / "weight_hub" / "artifacts") as folder:
        yield folder


async def test_a_version_waits_for_room_at_the_hub(
    spool: Path, mesh: Any, engine: Any, state: Any, tracebacks: list[str]
) -> None:
    publisher = mesh.publisher(Transport.STREAM, retry_for_s=30.0)
    filler = fill(spool)
    asyncio.get_running_loop().call_later(1.0, filler.unlink)
    report = await publisher.publish(0, state(1))
    mesh.start_agent("e0", engine)
    await mesh.client().activate_version(run_id="run", version=0, prepare_deadline_s=20.0)
    assert engine.root == report.root
    assert tracebacks == []


async def test_a_version_that_finds_no_room_at_the_hub_ends_with_a_sentence_and_the_next_one_goes_through(
    spool: Path, mesh: Any, engine: Any, state: Any, tracebacks: list[str]
) -> None:
    filler = fill(spool)
    with pytest.raises(MeshError) as caught:
        await mesh.publisher(Transport.STREAM, retry_for_s=0.5).publish(0, state(1))
    assert caught.value.reason is Reason.OVERLOADED
    assert f"the hub has no room for version 0 in {spool}" in caught.value.message
    assert "free some space there" in caught.value.message
    assert tracebacks == []
    filler.unlink()
    report = await mesh.publisher(Transport.STREAM).publish(1, state(2))
    mesh.start_agent("e0", engine)
    await mesh.client().activate_version(run_id="run", version=1, prepare_deadline_s=20.0)
    assert engine.root == report.root


async def test_an_engine_without_room_for_a_version_refuses_it_in_a_sentence_and_takes_it_when_asked_again(
    mesh: Any, engine: Any, state: Any, tmp_path: Path, tracebacks: list[str]
) -> None:
    engine.stages_from_files = True
    with mounted(tmp_path / "engine", mebibytes=1) as folder:
        filler = fill(folder)
        mesh.start_agent("e0", engine, spool_dir=folder)
        await mesh.until_registered()
        report = await mesh.publisher(Transport.STREAM).publish(0, state(1))
        with pytest.raises(MeshError, match=r"e0 refused it") as caught:
            await mesh.client().activate_version(run_id="run", version=0, prepare_deadline_s=20.0)
        assert caught.value.metadata == {"e0": Reason.OVERLOADED.name}
        fault = mesh.hub.list_engines("")[0].last_fault
        assert fault.message.startswith(f"version 0 cannot be written to {folder} on this host: [Errno 28]")
        assert fault.message.endswith("free some space there, and it is brought here again")
        assert tracebacks == []
        filler.unlink()
        await mesh.client().activate_version(run_id="run", version=0, prepare_deadline_s=20.0)
        assert engine.root == report.root
        assert list(folder.iterdir()) == []
