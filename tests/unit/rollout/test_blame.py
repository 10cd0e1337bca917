"""Whose doing it was that a worker was lost, and which rollouts are played again."""

import pytest

from meshrl.rollout.workers.blame import MOST_TRIES, NO_ROLLOUT, NOBODY, Culprit, Fault, Tries

BUSY = ("good", "bad")


@pytest.mark.parametrize(
    ("culprit", "busy", "expected"),
    [
        (
            Culprit("bad", (1, 0)),
            BUSY,
            {("bad", 1, 0): Fault.OWN, ("bad", 1, 1): Fault.UNKNOWN, ("good", 2, 0): Fault.OTHERS},
        ),
        (
            Culprit("bad"),
            BUSY,
            {("bad", 1, 0): Fault.OWN, ("bad", *NO_ROLLOUT): Fault.OWN, ("good", 2, 0): Fault.OTHERS},
        ),
        (NOBODY, BUSY, {("bad", 1, 0): Fault.UNKNOWN, ("good", 2, 0): Fault.UNKNOWN}),
        (NOBODY, ("bad",), {("bad", 1, 0): Fault.OWN}),
    ],
    ids=["a rollout", "an environment", "nobody knows", "there is one environment"],
)
def test_whose_fault_a_loss_is(
    culprit: Culprit, busy: tuple[str, ...], expected: dict[tuple[str, int, int], Fault]
) -> None:
    found = {key: culprit.fault_of(key[0], (key[1], key[2]), busy) for key in expected}
    assert found == expected


def test_what_others_did_costs_no_try() -> None:
    tries = Tries()
    assert all(tries.again(Fault.OTHERS) for _ in range(100))
    assert [tries.again(Fault.UNKNOWN) for _ in range(MOST_TRIES)] == [True] * (MOST_TRIES - 1) + [False]
    assert not Tries().again(Fault.OWN)
