"""A hub or an engine without room for a version says what to do in a sentence, and once there is room it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from opentelemetry import trace

from meshrl.core.config.shared import ServerConfig
from meshrl.weights.config import WeightsConfig
from meshrl.weights.main import serve
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Transport
from polling import until
from small_disk import fill, mounted
from unnamed_files import unnamed_files
from weight_mesh import MemoryEngine, Mesh, make_state


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Path]:
    """The folder of the versions that are streamed to the hub, a disk of its own; to be asked for before `mesh`."""
    with mounted(tmp_path / "weight_hub" / "artifacts") as folder:
        yield folder


async def test_a_version_waits_for_room_at_the_hub(
    spool: Path, mesh: Mesh, engine: MemoryEngine, errors_said: list[str]
) -> None:
    publisher = mesh.publisher(Transport.STREAM, retry_for_s=30.0)
    filler = fill(spool)
    asyncio.get_running_loop().call_later(1.0, filler.unlink)
    report = await publisher.publish(0, make_state(1))
    mesh.start_agent("e0", engine)
    await mesh.client().activate_version(run_id="run", version=0, prepare_deadline_s=20.0)
    assert engine.root == report.root
    assert "Traceback" not in "".join(errors_said)


async def test_a_version_that_finds_no_room_at_the_hub_ends_with_a_sentence_and_the_next_one_goes_through(
    spool: Path, mesh: Mesh, engine: MemoryEngine, errors_said: list[str]
) -> None:
    filler = fill(spool)
    with pytest.raises(MeshError) as caught:
        await mesh.publisher(Transport.STREAM, retry_for_s=0.5).publish(0, make_state(1))
    assert caught.value.reason is Reason.OVERLOADED
    assert f"the hub has no room for version 0 in {spool}" in caught.value.message
    assert "free some space there" in caught.value.message
    assert "Traceback" not in "".join(errors_said)
    filler.unlink()
    report = await mesh.publisher(Transport.STREAM).publish(1, make_state(2))
    mesh.start_agent("e0", engine)
    await mesh.client().activate_version(run_id="run", version=1, prepare_deadline_s=20.0)
    assert engine.root == report.root


async def test_a_hub_whose_log_finds_no_room_ends_with_a_sentence_and_goes_on_when_it_is_started_again(
    tmp_path: Path, mesh: Mesh, engine: MemoryEngine, errors_said: list[str]
) -> None:
    await mesh.kill_hub()
    with mounted(tmp_path / "weight_hub") as disk:
        await mesh.start_hub()
        publisher = mesh.publisher(Transport.FILESYSTEM)
        await publisher.publish(0, make_state(1))
        filler = fill(disk)
        for version in range(1, 100):  # until the log's last page is full as well
            manifest = (await publisher.prepare(version, {"w": torch.full((8,), float(version))})).manifest
            with pytest.raises(MeshError) as caught:
                await mesh.client().create_version(manifest)
            if caught.value.reason is not Reason.OVERLOADED:
                break
        assert "the log cannot be written" in caught.value.message
        await asyncio.wait_for(asyncio.shield(mesh.hub.failed), 60.0)
        (sentence,) = (said for said in errors_said if said.startswith("the log cannot be written"))
        assert sentence.startswith(
            f"the log cannot be written: cannot write to {disk / 'decisions.sqlite'}: No space left"
        )
        assert "free some space and start again" in sentence
        assert "Traceback" not in "".join(errors_said)
        await mesh.kill_hub()
        filler.unlink()
        await mesh.start_hub()
        report = await publisher.publish(100, make_state(2))
        mesh.start_agent("e0", engine)
        await mesh.client().activate_version(run_id="run", version=100, prepare_deadline_s=20.0)
        assert engine.root == report.root
        await mesh.kill_agent("e0")
        await mesh.kill_hub()


async def test_a_hub_that_finds_no_room_at_its_start_says_what_to_do(tmp_path: Path, errors_said: list[str]) -> None:
    with mounted(tmp_path / "weight_hub") as disk:
        fill(disk)
        config = WeightsConfig(server=ServerConfig(port=0), output_dir=tmp_path)
        assert await serve(config, asyncio.Event(), trace.NoOpTracer()) == 1
    (sentence,) = errors_said
    assert sentence.startswith("the hub cannot start: cannot write")
    assert "free some space and start again" in sentence
    assert "Traceback" not in "".join(errors_said)


async def test_an_engine_without_room_for_a_version_refuses_it_in_a_sentence_and_takes_it_when_asked_again(
    mesh: Mesh, engine: MemoryEngine, tmp_path: Path, errors_said: list[str]
) -> None:
    engine.stages_from_files = True
    with mounted(tmp_path / "engine", mebibytes=1) as folder:
        filler = fill(folder)
        mesh.start_agent("e0", engine, spool_dir=folder)
        await mesh.until_registered()
        report = await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
        with pytest.raises(MeshError, match=r"e0 refused it") as caught:
            await mesh.client().activate_version(run_id="run", version=0, prepare_deadline_s=20.0)
        assert caught.value.metadata == {"e0": Reason.OVERLOADED.name}
        fault = mesh.hub.list_engines("")[0].last_fault
        assert fault.message.startswith(f"version 0 cannot be written to {folder} on this host: [Errno 28]")
        assert fault.message.endswith("free some space there, and it is brought here again")
        assert "Traceback" not in "".join(errors_said)
        filler.unlink()
        await mesh.client().activate_version(run_id="run", version=0, prepare_deadline_s=20.0)
        assert engine.root == report.root
        await until(lambda: not unnamed_files(folder))
