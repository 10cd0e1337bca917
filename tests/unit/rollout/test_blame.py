"""Whose doing it was that a worker was lost, and which rollouts are played again."""

import pytest

from meshrl.rollout.workers.blame import MOST_TRIES, NOBODY, Culprit, Fault, Tries

BUSY = ("good", "bad")


@pytest.mark.parametrize(
    ("culprit", "busy", "expected"),
    [
        (
            Culprit("bad", "one"),
            BUSY,
            {("bad", "one"): Fault.OWN, ("bad", "two"): Fault.UNKNOWN, ("good", "three"): Fault.OTHERS},
        ),
        (
            Culprit("bad"),
            BUSY,
            {("bad", "one"): Fault.OWN, ("bad", "two"): Fault.OWN, ("good", "three"): Fault.OTHERS},
        ),
        (NOBODY, BUSY, {("bad", "one"): Fault.UNKNOWN, ("good", "three"): Fault.UNKNOWN}),
        (NOBODY, ("bad",), {("bad", "one"): Fault.OWN}),
    ],
    ids=["a rollout", "an environment", "nobody knows", "there is one environment"],
)
def test_whose_fault_a_loss_is(culprit: Culprit, busy: tuple[str, ...], expected: dict[tuple[str, str], Fault]) -> None:
    found = {key: culprit.fault_of(*key, busy) for key in expected}
    assert found == expected


def test_what_others_did_costs_no_try() -> None:
    tries = Tries()
    assert all(tries.again(Fault.OTHERS) for _ in range(100))
    assert [tries.again(Fault.UNKNOWN) for _ in range(MOST_TRIES)] == [True] * (MOST_TRIES - 1) + [False]
    assert not Tries().again(Fault.OWN)
