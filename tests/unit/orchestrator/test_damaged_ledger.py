"""Rows of the ledger are damaged on disk: what is damaged is never used, and costs no more than itself."""

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ledger_audit import audit
from meshrl.core.paths import Layout
from meshrl.orchestrator.ledger.checkpoint_state import read_state, state_path, write_state
from meshrl.orchestrator.ledger.journal import Journal
from meshrl.orchestrator.ledger.open_run import open_journal
from meshrl.orchestrator.ledger.rows import StepRecord
from meshrl.orchestrator.ledger.store import LedgerStore
from meshrl.orchestrator.work.screening import RunTotals
from meshrl.sampling.retry import RunError
from meshrl.wire.types import RunInfo, TrainerInfo


def reopened(folder: Path, trainer_step: int) -> Journal:
    """What a process of the orchestrator opens beside a trainer at this step."""
    run = RunInfo(run_id="main", step=trainer_step, version=trainer_step, epoch=1, revision=0, durable_step=0)
    trainer = TrainerInfo(
        world_size=1, dp_size=1, seq_len=64, pad_multiple=1, objective="", model="", runs=(run,), max_queued_batches=2
    )
    return open_journal(Layout(folder), trainer, run, session="one", least_rollouts={"echo": 2}, checkpoints=False)


@pytest.fixture
async def folder(tmp_path: Path, finish_group, batch_group) -> Path:
    """Three groups have come back, two of them as the batches of steps 1 and 2; the trainer has not trained yet."""
    journal = reopened(tmp_path, 0)

    for step in (1, 2):
        await batch_group(journal, finish_group(journal, f"g{step}", 3), step)
    finish_group(journal, "g3", 3)
    journal.close()
    return tmp_path


def change(folder: Path, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection, connection:
        assert connection.execute(sql, values).rowcount == 1


def flip_in(folder: Path, column: str, where: str, bit: int | Callable[[bytes], int] = 100) -> None:
    """Flips one bit of a row's data."""
    table = where.split()[0]
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection, connection:
        ((data,),) = connection.execute(f"SELECT {column} FROM {where}").fetchall()
        raw = bytearray(data.encode() if isinstance(data, str) else data)
        place = (bit if isinstance(bit, int) else bit(bytes(raw))) % (8 * len(raw))
        raw[place // 8] ^= 1 << place % 8
        new = raw.decode() if isinstance(data, str) else bytes(raw)
        connection.execute(f"UPDATE {table} SET {column} = ? {where.removeprefix(table)}", (new,))


def states(folder: Path) -> dict[tuple[str, str], int]:
    return dict(audit(folder).counts)


def test_no_flipped_bit_of_a_payload_or_a_batch_is_read(folder: Path) -> None:
    chance = random.Random(0)
    store = LedgerStore(folder / "ledger.sqlite")
    store._run = 1
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        (text,) = connection.execute("SELECT record FROM steps WHERE step = 1").fetchone()
    record = StepRecord.from_json(text)

    def is_read(row: str) -> bool:
        return bool(store.rollouts(["g30"])) if row.startswith("payloads") else store.batch(record) is not None

    read = []
    rows = ("payloads WHERE rollout_id = 'g30'", *(f"parts WHERE step = 1 AND part = {part}" for part in (0, 1)))
    for row in 16 * rows:
        assert is_read(row)
        bit = chance.randrange(2**32)
        flip_in(folder, "data", row, bit)
        if is_read(row):
            read.append((row, bit))
        flip_in(folder, "data", row, bit)
    assert read == [], f"{len(read)} of 48 flipped bits were read"


def test_a_damaged_payload_costs_its_rollout(folder: Path) -> None:
    flip_in(folder, "data", "payloads WHERE rollout_id = 'g31'")
    journal = reopened(folder, 0)
    (group,) = journal.starting_point.ready
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g30", "g32"]
    assert journal.ledger.balance().exact
    assert journal.ledger.balance().dropped == {"payload_damaged": 1}
    journal.close()
    report = audit(folder)
    assert report.ok, report.table()
    assert report.counts[("dropped", "payload_damaged")] == 1


def test_too_many_damaged_payloads_cost_their_group(folder: Path) -> None:
    for name in ("g30", "g31"):
        flip_in(folder, "data", f"payloads WHERE rollout_id = '{name}'")
    journal = reopened(folder, 0)
    assert journal.starting_point.ready == ()
    journal.close()
    assert audit(folder).ok
    assert states(folder) == {("batched", ""): 6, ("dropped", "payload_damaged"): 2, ("dropped", "group_lost"): 1}


@pytest.mark.parametrize(
    "bit", [lambda data: 8 * data.index(b"echo") + 1, lambda data: 8 * data.index(b"00-1-2-01") + 1, 77]
)
async def test_what_a_damaged_batch_took_goes_into_another(folder: Path, bit) -> None:
    flip_in(folder, "data", "parts WHERE step = 2 AND part = 0", bit)
    journal = reopened(folder, 0)
    assert journal.starting_point.recorded == 1
    assert sorted(group.ticket.group_id for group in journal.starting_point.ready) == ["g2", "g3"]
    assert (await journal.load_batch(1)).step == 1
    journal.close()
    assert states(folder) == {("batched", ""): 3, ("finished", ""): 6}
    assert audit(folder).ok


def test_a_batch_under_another_steps_number_is_damaged(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection, connection:
        connection.execute("DELETE FROM parts WHERE step = 2")
        connection.execute("INSERT INTO parts SELECT run, 2, part, data, seal FROM parts WHERE step = 1")
    journal = reopened(folder, 0)
    assert journal.starting_point.recorded == 1
    journal.close()


def test_a_damaged_batch_that_was_trained_costs_only_its_line_of_metrics(folder: Path) -> None:
    flip_in(folder, "data", "parts WHERE step = 1 AND part = 1")
    journal = reopened(folder, 1)
    assert (journal.starting_point.recorded, journal.starting_point.unlogged_from) == (2, 2)
    assert journal.starting_point.progress.samples == 3
    journal.close()
    assert states(folder) == {("trained", ""): 3, ("batched", ""): 3, ("finished", ""): 3}


async def test_a_batch_that_is_damaged_while_the_run_goes_on_ends_with_a_sentence(folder: Path) -> None:
    journal = reopened(folder, 0)
    flip_in(folder, "data", "parts WHERE step = 2 AND part = 1")
    with pytest.raises(RunError, match=r"the batch of step 2 in .*ledger.sqlite is damaged or gone; start"):
        await journal.load_batch(2)
    journal.close()


@pytest.mark.parametrize("table", ["payloads", "parts"])
def test_a_row_without_its_digest_is_damaged(folder: Path, table: str) -> None:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection, connection:
        connection.execute(f"UPDATE {table} SET seal = x''")
    journal = reopened(folder, 0)
    assert journal.starting_point.recorded == (2 if table == "payloads" else 0)
    assert [len(group.rollouts) for group in journal.starting_point.ready] == ([] if table == "payloads" else [3, 3, 3])
    journal.close()


def test_a_damaged_record_of_a_step_to_come_releases_it(folder: Path) -> None:
    flip_in(folder, "record", "steps WHERE step = 2", lambda data: 8 * data.index(b'"tokens": ') + 80)
    journal = reopened(folder, 0)
    assert journal.starting_point.recorded == 1
    journal.close()
    assert states(folder) == {("batched", ""): 3, ("finished", ""): 6}


def test_totals_come_from_the_checkpoint_where_the_record_is_damaged_or_end_with_a_sentence(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        (text,) = connection.execute("SELECT record FROM steps WHERE step = 1").fetchone()
    flip_in(folder, "record", "steps WHERE step = 1", lambda data: 8 * data.index(b'"tokens": ') + 80)
    with pytest.raises(RunError, match=r"the record of step 1 in .*ledger.sqlite is damaged.*--ckpt.resume-step"):
        reopened(folder, 1)
    totals = RunTotals(tokens=15, samples=3, problems=1)
    write_state(Layout(folder), replace(StepRecord.from_json(text), progress=totals, drawn={"echo": 1}))
    journal = reopened(folder, 1)
    assert journal.starting_point.progress.tokens == 15
    journal.close()


def test_a_checkpoint_of_an_earlier_run_in_the_folder_is_named(folder: Path, said: list[str]) -> None:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        (text,) = connection.execute("SELECT record FROM steps WHERE step = 1").fetchone()
    for tokens in (15, 99):
        totals = RunTotals(tokens=tokens, samples=3, problems=1)
        write_state(Layout(folder), replace(StepRecord.from_json(text), progress=totals))
        reopened(folder, 1).close()
    named = [line for line in said if "is not of this run" in line]
    assert len(named) == 1
    assert "which has 15 tokens by then, where the checkpoint has 99" in named[0]


def test_a_checkpoints_totals_are_read_as_they_were_written_or_not_at_all(folder: Path) -> None:
    layout = Layout(folder)
    with closing(sqlite3.connect(layout.ledger)) as connection:
        (text,) = connection.execute("SELECT record FROM steps WHERE step = 1").fetchone()
    write_state(layout, StepRecord.from_json(text))
    assert read_state(layout, 1) == (RunTotals(tokens=15, samples=3, problems=1), {"echo": 1}, {})
    path = state_path(layout, 1)
    path.write_text(path.read_text().replace('"tokens": 15', '"tokens": 17'))
    with pytest.raises(RunError, match=r"progress.json, which has the run's totals up to step 1, is damaged"):
        read_state(layout, 1)
