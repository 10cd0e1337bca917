from collections.abc import Callable

import pytest

from meshrl.orchestrator.ledger.rules import Ledger, LedgerEntry, LedgerError, RolloutState


@pytest.fixture
def begun(make_group) -> Callable[..., tuple[Ledger, list[LedgerEntry]]]:
    """A ledger with a group of `size` rollouts, of which these came back, and its changed entries."""

    def begun(size: int, finished: str) -> tuple[Ledger, list[LedgerEntry]]:
        entries: list[LedgerEntry] = []
        ledger, ticket = Ledger(entries.append), make_group(size=size).ticket
        ledger.dispatch(ticket)
        for version, name in enumerate(finished):
            ledger.finish(ticket, name, version)
        return ledger, entries

    return begun


def test_a_rollout_is_followed_from_dispatch_to_training(begun) -> None:
    ledger, entries = begun(2, "ab")
    ledger.close_group("g0")
    ledger.batch("ab", step=3)
    ledger.train(3)
    states = [entry.state.value for entry in entries if entry.key == "g0/0"]
    assert states == ["dispatched", "finished", "batched", "trained"]
    assert (entries[-1].rollout_id, entries[-1].oldest_version, entries[-1].step) == ("b", 1, 3)
    assert str(ledger.balance()) == "dispatched 2 = trained 2 + dropped 0 + failed 0 + cancelled 0 + open 0"


def test_losses_are_counted_by_reason(begun) -> None:
    ledger, _ = begun(4, "a")
    ledger.fail("g0", "b", "ENVIRONMENT_FAILED")
    ledger.close_group("g0", cancelled=1, reason="UNREACHABLE")
    ledger.drop("a", "group_lost")
    balance = ledger.balance()
    assert balance.exact
    assert (balance.dropped, balance.failed) == ({"group_lost": 1}, {"ENVIRONMENT_FAILED": 1, "UNREACHABLE": 1})
    assert (balance.cancelled, balance.open) == (1, 0)


def test_what_is_out_has_neither_come_back_nor_been_given_up(begun, make_group) -> None:
    ledger, _ = begun(3, "")
    assert ledger.out == 3
    ledger.finish(make_group(size=3).ticket, "a", 0)
    for name in "bcd":  # one more than were dispatched
        ledger.fail("g0", name, "ENVIRONMENT_FAILED")
    ledger.finish(make_group(size=3).ticket, "e", 0)  # of another agent
    assert (ledger.out, ledger.balance().dispatched) == (0, 4)
    ledger.close_group("g0")
    ledger.batch("ae", step=1)
    ledger.train(1)
    assert ledger.out == 0
    ledger.undo(1)
    assert ledger.out == 0


def test_a_rollout_cannot_be_trained_twice_or_after_it_was_dropped(begun, make_group) -> None:
    ledger, _ = begun(2, "ab")
    ledger.batch("a", step=1)
    with pytest.raises(LedgerError, match="cannot go from batched to batched"):
        ledger.batch("a", step=2)
    ledger.drop("b", "stale")
    with pytest.raises(LedgerError, match="rollout b is not open"):
        ledger.batch("b", step=2)
    with pytest.raises(LedgerError, match="rollout a finished before"):
        ledger.finish(make_group(size=2).ticket, "a", 0)


def test_the_end_of_a_run_closes_everything(begun, make_group) -> None:
    ledger, _ = begun(2, "ab")
    ledger.dispatch(make_group("g2", size=3).ticket)
    ledger.batch("a", step=1)
    ledger.end("run_ended")
    balance = ledger.balance()
    assert (balance.dropped, balance.cancelled, balance.open) == ({"run_ended": 2}, 3, 0)
    assert balance.exact


def test_a_forgotten_step_is_batched_again_and_counted_once(begun) -> None:
    ledger, entries = begun(2, "ab")
    ledger.batch("ab", step=1)
    ledger.train(1)
    ledger.undo(1)
    assert (ledger.balance().trained, ledger.balance().open) == (0, 2)
    assert (entries[-1].state.value, entries[-1].step) == ("batched", 1)
    ledger.train(1)
    assert (ledger.balance().trained, ledger.balance().open) == (2, 0)
    assert ledger.balance().exact
    ledger.make_final(1)
    ledger.undo(1)
    assert ledger.balance().trained == 2, "a durable step is final"


def test_a_released_step_gives_its_rollouts_back(begun) -> None:
    ledger, entries = begun(3, "abc")
    ledger.batch("a", step=1)
    ledger.train(1)
    ledger.batch("b", step=2)
    ledger.release(1)
    ledger.release(2)
    assert [(entry.rollout_id, entry.state.value, entry.step) for entry in entries[-2:]] == [
        ("a", "finished", None), ("b", "finished", None),
    ]  # fmt: skip
    ledger.batch("abc", step=1)
    ledger.train(1)
    assert ledger.balance().trained == 3
    assert ledger.balance().exact


def test_another_process_goes_on_with_the_same_balance(begun) -> None:
    ledger, entries = begun(5, "abc")
    ledger.batch("a", step=1)
    ledger.train(1)
    ledger.drop("c", "stale")
    again = Ledger(lambda entry: None)
    last = {entry.key: entry for entry in entries}.values()
    left = [entry for entry in last if entry.state is not RolloutState.DROPPED]
    again.restore(left, {(RolloutState.DROPPED, "stale"): 1})
    assert str(again.balance()) == str(ledger.balance())
    again.interrupt("g0", "orchestrator_restarted")
    again.undo(1)
    again.batch("b", step=2)
    again.train(1)
    again.train(2)
    assert str(again.balance()) == "dispatched 5 = trained 2 + dropped 1 (stale 1) + failed 0 + cancelled 2 + open 0"
