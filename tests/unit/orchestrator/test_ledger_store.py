import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ledger_audit import audit
from meshrl.core.sqlite_files import seal
from meshrl.orchestrator.ledger.resume import plan_resume, restore
from meshrl.orchestrator.ledger.rows import Past, RunRow, StepRecord
from meshrl.orchestrator.ledger.rules import Ledger
from meshrl.orchestrator.ledger.store import LedgerStore
from meshrl.orchestrator.ledger.writer import LedgerFileError
from meshrl.orchestrator.work.batches import assemble
from meshrl.orchestrator.work.screening import RunTotals
from meshrl.sampling.groups import GroupTicket, RolloutGroup
from meshrl.wire import convert
from meshrl.wire.types import Batch, Rollout
from rl_streams import rl_streams

pytestmark = pytest.mark.usefixtures("ledger_disk")

RUN = RunRow(run=0, run_id="main", session="", epoch=1, first_step=1, metrics_offset=0)


def query(path: Path, sql: str) -> list[tuple]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def states(path: Path) -> list[tuple]:
    return query(path, "SELECT key, state, reason FROM rollouts ORDER BY key")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def fresh(path: Path) -> LedgerStore:
    store = LedgerStore(path)
    store.open()
    store.begin(RUN)
    return store


def resumed(path: Path, trainer_step: int) -> tuple[LedgerStore, Past]:
    store = LedgerStore(path)
    last = store.open()
    assert last is not None
    return store, store.resume(last, trainer_step=trainer_step)


def batch_of(rollouts: list[Rollout], step: int) -> Batch:
    return assemble(
        [rollouts],
        run_id="main",
        step=step,
        streams=rl_streams([rollouts], lambda rewards, lengths: np.asarray(rewards)),
        environments={"echo": 64},
        seq_len=64,
        dp_size=1,
        traceparent="00-1-2-01",
    ).batch


def record_of(ticket: GroupTicket, rollouts: list[Rollout], batch: Batch) -> StepRecord:
    return StepRecord(
        step=batch.step,
        digest=convert.batch_digest(batch),
        groups=((ticket.group_id, tuple(rollout.rollout_id for rollout in rollouts)),),
        advantages={rollout.rollout_id: rollout.reward for rollout in rollouts},
        untrainable=(),
        truncated_samples=0,
        dropped_samples=0,
        longest_row=5,
        dp_size=1,
        progress=RunTotals(tokens=10, samples=2, problems=1),
        drawn={"echo": 1},
    )


def write_a_step(store: LedgerStore, group: RolloutGroup, rollouts: list[Rollout], step: int) -> Batch:
    """One whole group that a step took."""
    ledger = Ledger(store.record)
    store.dispatched(group.ticket)
    ledger.dispatch(group.ticket)
    for rollout in rollouts:
        store.keep(rollout)
        ledger.finish(group.ticket, rollout.rollout_id, rollout.oldest_version)
    ledger.close_group(group.ticket.group_id)
    store.over(group)
    batch = batch_of(rollouts, step)
    ledger.batch([rollout.rollout_id for rollout in rollouts], step)
    store.batched(record_of(group.ticket, rollouts, batch), batch)
    store.flush().result(60.0)
    return batch


def test_the_file_holds_the_last_state_of_each_rollout(make_group, path: Path) -> None:
    store = fresh(path)
    ledger = Ledger(store.record)
    ticket = make_group(size=3).ticket
    ledger.dispatch(ticket)
    ledger.finish(ticket, "a", 0)
    ledger.fail("g0", "b", "DEADLINE_PASSED")
    ledger.close_group("g0", cancelled=1)
    ledger.batch(["a"], step=1)
    ledger.train(1)
    store.close()
    assert states(path) == [
        ("g0/0", "trained", ""),
        ("g0/1", "failed", "DEADLINE_PASSED"),
        ("g0/2", "cancelled", "rollout_service"),
    ]


@pytest.mark.parametrize("seed", [None, 0, 2**62])
def test_a_group_keeps_its_seed_or_that_it_has_none(make_group, path: Path, seed: int | None) -> None:
    store = fresh(path)
    ticket = replace(make_group(size=2).ticket, seed=seed)
    store.dispatched(ticket)
    Ledger(store.record).dispatch(ticket)
    store.close()
    _, past = resumed(path, trainer_step=0)
    assert past.groups["g0"].ticket.seed == seed


def test_a_flush_returns_when_all_before_it_is_committed(make_group, path: Path) -> None:
    store = fresh(path)
    Ledger(store.record).dispatch(make_group(size=2).ticket)
    store.flush().result(60.0)
    assert len(states(path)) == 2
    store.close()


def test_a_recorded_batch_is_read_back_to_the_byte(make_group, make_rollout, path: Path) -> None:
    store = fresh(path)
    group = make_group(size=2)
    rollouts = [make_rollout("a", reward=1.0), make_rollout("b", reward=-1.0, sampled=5)]
    batch = write_a_step(store, group, rollouts, step=1)
    store.close()
    store, past = resumed(path, trainer_step=0)
    again = store.batch(past.steps[1])
    assert again is not None
    assert [message.SerializeToString() for message in convert.batch_to_messages(again)] == [
        message.SerializeToString() for message in convert.batch_to_messages(batch)
    ]
    assert past.steps[1] == record_of(group.ticket, rollouts, batch)
    assert past.groups["g0"].ticket == group.ticket
    found = store.rollouts(["a", "b", "unknown"])
    assert {name: rollout.reward for name, rollout in found.items()} == {"a": 1.0, "b": -1.0}
    assert found["b"].samples[0].token_ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
    store.close()


def test_a_record_that_older_code_wrote_is_read(make_group, make_rollout, path: Path) -> None:
    group, store = make_group(size=2), fresh(path)
    rollouts = [make_rollout("a", reward=1.0), make_rollout("b", reward=-1.0)]
    batch = write_a_step(store, group, rollouts, step=1)
    store.close()
    record = record_of(group.ticket, rollouts, batch)
    older = json.dumps({**json.loads(record.to_json()), "micro_batches": 1})
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE steps SET record = ?, seal = ?", (older, seal(older.encode(), 1, 1)))
    store, past = resumed(path, trainer_step=0)
    assert (past.steps, past.damaged_steps) == ({1: record}, frozenset())
    store.close()


def test_routes_of_experts_are_not_kept_and_the_batch_is_the_same_without(make_group, make_rollout, path: Path) -> None:
    def routed(name: str) -> Rollout:
        rollout = make_rollout(name, reward=1.0)
        samples = [
            replace(sample, routed_experts=np.zeros((len(sample.token_ids), 2, 2), np.uint8))
            for sample in rollout.samples
        ]
        return replace(rollout, samples=tuple(samples))

    store = fresh(path)
    batch = write_a_step(store, make_group(size=2), [routed("a"), routed("b")], step=1)
    assert batch.micro_batches[0].routed_experts is not None
    store.close()
    store, past = resumed(path, trainer_step=0)
    again = store.batch(past.steps[1])
    assert again is not None
    assert again.micro_batches[0].routed_experts is None
    assert convert.batch_digest(again) == convert.batch_digest(batch) == past.steps[1].digest
    assert store.rollouts(["a"])["a"].samples[0].routed_experts is None
    store.close()


def test_payloads_go_when_their_step_is_durable_or_they_are_dropped(make_group, make_rollout, path: Path) -> None:
    store = fresh(path)
    write_a_step(store, make_group("g1", size=2), [make_rollout("a"), make_rollout("b", reward=1.0)], step=1)
    write_a_step(store, make_group("g2", size=2), [make_rollout("c"), make_rollout("d", reward=1.0)], step=2)
    store.forget(1)
    ledger = Ledger(store.record)
    ticket = make_group("g3", size=1).ticket
    ledger.dispatch(ticket)
    store.keep(make_rollout("e"))
    ledger.finish(ticket, "e", 0)
    ledger.drop("e", "stale")
    store.close()
    assert query(path, "SELECT rollout_id FROM payloads ORDER BY 1") == [("c",), ("d",)]
    assert query(path, "SELECT DISTINCT step FROM parts") == [(2,)]


def test_a_run_that_begins_anew_closes_the_one_before(make_group, make_rollout, path: Path) -> None:
    store = fresh(path)
    write_a_step(store, make_group("g1", size=2), [make_rollout("a"), make_rollout("b", reward=1.0)], step=1)
    Ledger(store.record).dispatch(make_group("g2", size=1).ticket)
    store.close()
    fresh(path).close()
    assert states(path) == [
        ("g1/0", "dropped", "superseded"),
        ("g1/1", "dropped", "superseded"),
        ("g2/0", "cancelled", "superseded"),
    ]
    assert query(path, "SELECT COUNT(*) FROM payloads") == [(0,)]
    assert query(path, "SELECT run, ended FROM runs ORDER BY run") == [(1, "superseded"), (2, "")]


def test_what_the_end_of_a_run_cut_off_is_open_again_when_it_goes_on(make_group, make_rollout, path: Path) -> None:
    store = fresh(path)
    rollouts = [make_rollout("a"), make_rollout("b", reward=1.0)]
    write_a_step(store, make_group("g1", size=2), rollouts, step=1)
    _, past = resumed(path, trainer_step=0)
    ledger = Ledger(store.record)
    ledger.restore(past.entries, past.ended)
    ledger.end("run_ended")
    store.end("run_ended")
    store.close()
    assert {state for _, state, _ in states(path)} == {"dropped"}

    store, past = resumed(path, trainer_step=1)  # the trainer finished the step while it drained
    plan = plan_resume(past, trainer_step=1, logged_step=0, dp_size=1, seq_len=64, environments={"echo": 2})
    assert (plan.trained, plan.unlogged, plan.again) == ((1,), (1,), ())
    restore(Ledger(store.record), past, plan)
    store.close()
    assert states(path) == [("g1/0", "trained", ""), ("g1/1", "trained", "")]


def test_rollouts_keep_their_trace_over_a_restart(make_group, path: Path) -> None:
    store, ticket = fresh(path), make_group("g1").ticket
    ledger = Ledger(store.record)
    ledger.dispatch(ticket)
    ledger.finish(ticket, "r1", 0, "a" * 32)
    ledger.fail("g1", "r2", "ENGINE_FAILED", "b" * 32)
    store.close()

    store, past = resumed(path, trainer_step=0)
    again = Ledger(store.record)
    again.restore(past.entries, past.ended)
    again.drop("r1", "stale")
    store.close()
    found = query(path, "SELECT rollout_id, state, trace_id FROM rollouts WHERE rollout_id != '' ORDER BY key")
    assert found == [("r1", "dropped", "a" * 32), ("r2", "failed", "b" * 32)]


@pytest.mark.parametrize("layout", [0, 2, 4])
def test_a_file_of_another_layout_is_refused_by_its_version_and_left_alone(path: Path, layout: int) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE rollouts (key TEXT PRIMARY KEY, state TEXT)")
        connection.execute("INSERT INTO rollouts VALUES ('old', 'trained')")
        connection.execute(f"PRAGMA user_version = {layout}")
    before = path.read_bytes()
    for read in (LedgerStore(path).open, lambda: audit(path.parent)):
        with pytest.raises(LedgerFileError, match=f"ledger.sqlite has layout {layout}, but .* layout 3 alone; choose"):
            read()
    assert path.read_bytes() == before


def test_a_write_that_fails_surfaces(make_group, path: Path) -> None:
    store = LedgerStore(path)
    store.open()
    store.begin(RUN)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE rollouts")
    ledger = Ledger(store.record)
    ledger.dispatch(make_group(size=1).ticket)
    with pytest.raises(LedgerFileError, match="no such table"):
        store.flush().result(60.0)
    with pytest.raises(LedgerFileError, match="no such table"):
        store.close()
