import sqlite3
from pathlib import Path

import pytest

from meshrl.orchestrator.ledger import Entry, Ledger, LedgerError
from meshrl.orchestrator.ledger_store import LedgerStore


def test_a_rollout_is_followed_from_dispatch_to_training(make_group) -> None:
    entries: list[Entry] = []
    ledger = Ledger(entries.append)
    ticket = make_group(size=2).ticket
    ledger.dispatch(ticket)
    ledger.finish(ticket, "a", 0)
    ledger.finish(ticket, "b", 1)
    assert ledger.close_group("g0") == 0
    ledger.batch(["a", "b"], step=3)
    assert ledger.train(3) == 2
    assert [entry.state.value for entry in entries if entry.key == "g0/0"] == [
        "dispatched",
        "finished",
        "batched",
        "trained",
    ]
    last = entries[-1]
    assert (last.rollout_id, last.oldest_version, last.step) == ("b", 1, 3)
    assert str(ledger.balance()) == "dispatched 2 = trained 2 + dropped 0 + failed 0 + cancelled 0 + open 0"


def test_losses_are_counted_by_reason(make_group) -> None:
    ledger = Ledger(lambda entry: None)
    ticket = make_group(size=4).ticket
    ledger.dispatch(ticket)
    ledger.finish(ticket, "a", 0)
    ledger.fail("g0", "b", "ENVIRONMENT_FAILED")
    assert ledger.close_group("g0", cancelled=1, reason="UNREACHABLE") == 2
    ledger.drop("a", "group_lost")
    balance = ledger.balance()
    assert balance.exact
    assert (balance.dropped, balance.failed, balance.cancelled, balance.open) == (
        {"group_lost": 1},
        {"ENVIRONMENT_FAILED": 1, "UNREACHABLE": 1},
        1,
        0,
    )


def test_a_rollout_cannot_be_trained_twice_or_after_it_was_dropped(make_group) -> None:
    ledger = Ledger(lambda entry: None)
    ticket = make_group(size=2).ticket
    ledger.dispatch(ticket)
    ledger.finish(ticket, "a", 0)
    ledger.finish(ticket, "b", 0)
    ledger.batch(["a"], step=1)
    with pytest.raises(LedgerError, match="cannot go from batched to batched"):
        ledger.batch(["a"], step=2)
    ledger.drop("b", "stale")
    with pytest.raises(LedgerError, match="rollout b is not open"):
        ledger.batch(["b"], step=2)
    with pytest.raises(LedgerError, match="rollout a finished before"):
        ledger.finish(ticket, "a", 0)


def test_the_end_of_a_run_closes_everything(make_group) -> None:
    ledger = Ledger(lambda entry: None)
    first, second = make_group("g1", size=2).ticket, make_group("g2", size=3).ticket
    ledger.dispatch(first)
    ledger.dispatch(second)
    ledger.finish(first, "a", 0)
    ledger.finish(first, "b", 0)
    ledger.batch(["a"], step=1)
    ledger.end("run_ended")
    balance = ledger.balance()
    assert (balance.dropped, balance.cancelled, balance.open) == ({"run_ended": 2}, 3, 0)
    assert balance.exact


def test_more_rollouts_than_dispatched_are_counted_as_dispatched(make_group) -> None:
    ledger = Ledger(lambda entry: None)
    ticket = make_group(size=1).ticket
    ledger.dispatch(ticket)
    ledger.finish(ticket, "proposer", 0)
    ledger.finish(ticket, "judge", 0)
    assert ledger.balance().dispatched == 2


def rows(path: Path) -> list[tuple[str, str, str]]:
    with sqlite3.connect(path) as connection:
        found = connection.execute("SELECT key, state, reason FROM rollouts ORDER BY key").fetchall()
    connection.close()
    return found


def test_the_file_holds_the_last_state_of_each_rollout(make_group, tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger.sqlite", flush_interval_s=0.01)
    assert store.open() == 0
    ledger = Ledger(store.record)
    ticket = make_group(size=3).ticket
    ledger.dispatch(ticket)
    ledger.finish(ticket, "a", 0)
    ledger.fail("g0", "b", "DEADLINE_PASSED")
    ledger.close_group("g0", cancelled=1)
    ledger.batch(["a"], step=1)
    ledger.train(1)
    store.close()
    assert rows(tmp_path / "ledger.sqlite") == [
        ("g0/0", "trained", ""),
        ("g0/1", "failed", "DEADLINE_PASSED"),
        ("g0/2", "cancelled", ""),
    ]


def test_reopening_settles_what_an_earlier_process_left_open(make_group, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    store = LedgerStore(path, flush_interval_s=0.01)
    store.open()
    ledger = Ledger(store.record)
    ticket = make_group(size=3).ticket
    ledger.dispatch(ticket)
    ledger.finish(ticket, "a", 0)
    ledger.finish(ticket, "b", 0)
    ledger.batch(["a"], step=1)
    ledger.batch(["b"], step=2)
    store.close()

    again = LedgerStore(path)
    assert again.open(trained_step=1) == 3
    again.close()
    assert rows(path) == [
        ("g0/0", "trained", ""),
        ("g0/1", "dropped", "orchestrator_restarted"),
        ("g0/2", "dropped", "orchestrator_restarted"),
    ]


def test_a_write_that_fails_surfaces(make_group, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    store = LedgerStore(path, flush_interval_s=0.0)
    store.open()
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE rollouts")
    connection.close()
    Ledger(store.record).dispatch(make_group(size=1).ticket)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        store.close()
