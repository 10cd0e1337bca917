import pytest

from meshrl.orchestrator.ledger.rules import Ledger, LedgerEntry, LedgerError, RolloutState


def test_a_rollout_is_followed_from_dispatch_to_training(make_group) -> None:
    entries: list[LedgerEntry] = []
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


def test_what_is_out_has_neither_come_back_nor_been_given_up(make_group) -> None:
    ledger = Ledger(lambda entry: None)
    ticket = make_group(size=3).ticket
    ledger.dispatch(ticket)
    assert ledger.out == 3
    ledger.finish(ticket, "a", 0)
    ledger.fail("g0", "b", "ENVIRONMENT_FAILED")
    ledger.fail("g0", "c", "ENVIRONMENT_FAILED")
    ledger.fail("g0", "d", "ENVIRONMENT_FAILED")  # one more than were dispatched
    ledger.finish(ticket, "e", 0)  # of another agent
    assert ledger.out == 0
    ledger.close_group("g0")
    ledger.batch(["a", "e"], step=1)
    ledger.train(1)
    assert ledger.out == 0
    ledger.undo(1)
    assert ledger.out == 0


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


def test_a_forgotten_step_is_batched_again_and_counted_once(make_group) -> None:
    entries: list[LedgerEntry] = []
    ledger = Ledger(entries.append)
    ticket = make_group(size=2).ticket
    ledger.dispatch(ticket)
    ledger.finish(ticket, "a", 0)
    ledger.finish(ticket, "b", 0)
    ledger.batch(["a", "b"], step=1)
    ledger.train(1)
    assert ledger.undo(1) == 2
    assert (ledger.balance().trained, ledger.balance().open) == (0, 2)
    assert (entries[-1].state.value, entries[-1].step) == ("batched", 1)
    assert ledger.train(1) == 2
    assert (ledger.balance().trained, ledger.balance().open) == (2, 0)
    assert ledger.balance().exact


def test_a_durable_step_is_final(make_group) -> None:
    ledger = Ledger(lambda entry: None)
    ticket = make_group(size=1).ticket
    ledger.dispatch(ticket)
    ledger.finish(ticket, "a", 0)
    ledger.batch(["a"], step=1)
    ledger.train(1)
    ledger.make_final(1)
    assert ledger.undo(1) == 0
    assert ledger.balance().trained == 1


def test_a_released_step_gives_its_rollouts_back(make_group) -> None:
    entries: list[LedgerEntry] = []
    ledger = Ledger(entries.append)
    ticket = make_group(size=3).ticket
    ledger.dispatch(ticket)
    for name in "abc":
        ledger.finish(ticket, name, 0)
    ledger.batch(["a"], step=1)
    ledger.train(1)
    ledger.batch(["b"], step=2)
    assert (ledger.release(1), ledger.release(2)) == (1, 1)
    assert {(entry.rollout_id, entry.state.value, entry.step) for entry in entries[-2:]} == {
        ("a", "finished", None),
        ("b", "finished", None),
    }
    ledger.batch(["a", "b", "c"], step=1)
    assert ledger.train(1) == 3
    assert ledger.balance().exact


def test_another_process_goes_on_with_the_same_balance(make_group) -> None:
    entries: dict[str, LedgerEntry] = {}
    ledger = Ledger(lambda entry: entries.update({entry.key: entry}))
    ticket = make_group(size=5).ticket
    ledger.dispatch(ticket)
    for name in "abc":
        ledger.finish(ticket, name, 0)
    ledger.batch(["a"], step=1)
    ledger.train(1)
    ledger.drop("c", "stale")
    again = Ledger(lambda entry: None)
    left = [entry for entry in entries.values() if entry.state.value != "dropped"]
    again.restore(left, {(RolloutState.DROPPED, "stale"): 1})
    assert str(again.balance()) == str(ledger.balance())
    assert again.interrupt("g0", "orchestrator_restarted") == 2
    assert again.undo(1) == 1
    again.batch(["b"], step=2)
    assert (again.train(1), again.train(2)) == (1, 1)
    assert str(again.balance()) == ("dispatched 5 = trained 2 + dropped 1 (stale 1) + failed 0 + cancelled 2 + open 0")
