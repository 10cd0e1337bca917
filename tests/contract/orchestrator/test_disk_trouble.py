"""The orchestrator on a disk that is full, damaged or read-only: one sentence, and the run goes on afterwards."""

import asyncio
import gc
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from opentelemetry import trace

from ledger_audit import audit, main
from meshrl.core import sqlite_files
from meshrl.core.paths import Layout
from meshrl.orchestrator.ledger import writer
from meshrl.orchestrator.main import orchestrate
from polling import until
from run_output import assert_exact
from small_disk import fill, make_read_only, mounted

TRACER = trace.get_tracer("test")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as folder:
        yield folder


def one_sentence(errors_said: list[str]) -> str:
    (said,) = errors_said
    assert "Traceback" not in said
    return said


def move_away(ledger: Path) -> None:
    for path in ledger.parent.glob(f"{ledger.name}*"):
        path.rename(path.with_name(f"damaged-{path.name}"))


async def test_a_full_disk_ends_the_run_with_a_sentence_and_it_goes_on_once_there_is_room(
    mesh, script, make_config, disk: Path, errors_said: list[str]
) -> None:
    config = make_config(mesh.services, max_steps=12, output_dir=disk)
    running = asyncio.create_task(orchestrate(config, asyncio.Event(), TRACER))
    await until(lambda: len(script.batches) >= 3)
    filler = fill(disk)
    assert await asyncio.wait_for(running, 60.0) == 1
    said = one_sentence(errors_said)
    assert "ledger.sqlite cannot be written" in said
    assert "free some space and start again: the run goes on where it stopped" in said
    errors_said.clear()
    assert await orchestrate(config, asyncio.Event(), TRACER) == 1  # still full
    assert "free some space" in one_sentence(errors_said)
    errors_said.clear()
    filler.unlink()
    assert await asyncio.wait_for(orchestrate(config, asyncio.Event(), TRACER), 60.0) == 0
    assert errors_said == []
    assert_exact(disk, 12)


async def test_a_ledger_that_fails_as_it_closes_leaves_no_other_file_open(
    mesh, script, make_config, tmp_path: Path, errors_said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(connection: sqlite3.Connection, path: Path) -> None:
        sqlite_files.prepare(connection, path)
        connection.execute("PRAGMA busy_timeout = 200")

    monkeypatch.setattr(writer, "prepare", prepare)
    stop = asyncio.Event()
    running = asyncio.create_task(orchestrate(make_config(mesh.services, max_steps=1000), stop, TRACER))
    metrics = Layout(tmp_path).metrics_jsonl
    await until(lambda: len(script.batches) >= 3 and metrics.exists() and metrics.stat().st_size)
    with closing(sqlite3.connect(Layout(tmp_path).ledger, isolation_level=None, timeout=60.0)) as other:
        other.execute("BEGIN IMMEDIATE")
        stop.set()
        assert await asyncio.wait_for(running, 60.0) == 1
    assert "ledger.sqlite is in use" in one_sentence(errors_said)
    gc.collect()  # a file that was left open warns here, which fails the test
    assert metrics.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("damage", ["no database", "a page", "another schema"])
async def test_a_damaged_ledger_ends_with_a_sentence_and_a_new_one_goes_on(
    mesh, script, make_config, tmp_path: Path, errors_said: list[str], damage: str
) -> None:
    script.durable_every = 1
    config = make_config(mesh.services, max_steps=3, checkpoint_interval=1)
    assert await orchestrate(config, asyncio.Event(), TRACER) == 0
    ledger = Layout(tmp_path).ledger
    if damage == "no database":
        ledger.write_bytes(b"not a database" * 1000)
    elif damage == "another schema":
        with closing(sqlite3.connect(ledger)) as connection, connection:
            connection.execute("ALTER TABLE runs RENAME COLUMN run_id TO other")
    else:
        data = bytearray(ledger.read_bytes())
        data[4096:] = b"\x55" * (len(data) - 4096)
        ledger.write_bytes(data)
    config = make_config(mesh.services, max_steps=6, checkpoint_interval=1)
    assert await orchestrate(config, asyncio.Event(), TRACER) == 1
    said = one_sentence(errors_said)
    assert f"ledger {ledger} is damaged" in said
    assert "move it and the files ledger.sqlite-* beside it away" in said
    assert main([str(tmp_path)]) == 2
    move_away(ledger)
    errors_said.clear()
    assert await asyncio.wait_for(orchestrate(config, asyncio.Event(), TRACER), 60.0) == 0
    report = audit(tmp_path)
    assert report.ok, report.table()
    assert (report.first_step, report.last_step) == (4, 6)


async def test_a_read_only_folder_ends_with_a_sentence(mesh, make_config, disk: Path, errors_said: list[str]) -> None:
    make_read_only(disk)
    config = make_config(mesh.services, max_steps=3, output_dir=disk / "run")
    assert await orchestrate(config, asyncio.Event(), TRACER) == 1
    assert "output_dir must be a folder that this user may write" in one_sentence(errors_said)
