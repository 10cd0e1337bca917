"""Deficit round robin: shares are kept, no run waits beyond its bound, and one that cannot train is passed over."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from meshrl.trainer.loop import FairScheduler

QUANTUM = 1_000
HISTORIES = 2_000
MAX_SLICE = 2_500  # a row may be longer than the quantum of a small share


@dataclass
class Run:
    share: float
    largest: int
    can_train: bool = True
    trained: int = 0
    waited: int = 0  # tokens of others since it could train
    allowed: float = 0.0  # and the most that there may be


def bound(run_id: str, runs: dict[str, Run], debt: float) -> float:
    """Tokens that others may train while a run waits that owes `debt`: one turn each, and one for each of its own
    quanta that pay the debt."""
    turns = 1 + math.ceil(debt / (runs[run_id].share * QUANTUM))
    return sum(turns * run.share * QUANTUM + run.largest for name, run in runs.items() if name != run_id)


def test_histories_keep_the_bound_on_waiting() -> None:
    for seed in range(HISTORIES):
        source = random.Random(seed)
        scheduler = FairScheduler(QUANTUM)
        runs = {
            f"run-{place}": Run(share=source.choice((0.25, 0.5, 1.0, 1.0, 2.0)), largest=source.randint(1, MAX_SLICE))
            for place in range(source.randint(2, 8))
        }
        owed = dict.fromkeys(runs, 0.0)  # kept apart from the scheduler: tokens beyond the turns that a run has had
        flickers = source.random() < 0.5
        for name, run in runs.items():
            scheduler.add(name, run.share)
            run.allowed = bound(name, runs, 0.0)
        for _ in range(60):
            if flickers and source.random() < 0.3:
                name = source.choice(list(runs))
                runs[name].can_train = not runs[name].can_train
                runs[name].waited, runs[name].allowed = 0, bound(name, runs, owed[name])
            slices = {name: source.randint(1, run.largest) for name, run in runs.items() if run.can_train}
            chosen = scheduler.next_run(slices)
            if chosen is None:
                assert not slices
                continue
            assert chosen in slices
            scheduler.charge(chosen, slices[chosen])
            runs[chosen].trained += slices[chosen]
            owed[chosen] = float(runs[chosen].largest)
            runs[chosen].waited, runs[chosen].allowed = 0, bound(chosen, runs, owed[chosen])
            for name, run in runs.items():
                if name != chosen and run.can_train:
                    run.waited += slices[chosen]
                    assert run.waited <= run.allowed, (seed, name)


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_within_five_percent_of_what_was_asked(seed: int) -> None:
    source = random.Random(seed)
    scheduler = FairScheduler(QUANTUM)
    shares = {f"run-{place}": source.choice((0.25, 0.5, 1.0, 2.0, 4.0)) for place in range(source.randint(2, 8))}
    largest = {name: source.randint(10, MAX_SLICE) for name in shares}
    for name, share in shares.items():
        scheduler.add(name, share)
    for _ in range(20_000):
        slices = {name: source.randint(1, largest[name]) for name in shares}
        chosen = scheduler.next_run(slices)
        assert chosen is not None
        scheduler.charge(chosen, slices[chosen])
    for name, share in shares.items():
        assert scheduler.used_share(name) == pytest.approx(share / sum(shares.values()), rel=0.05)


def test_a_run_that_cannot_train_saves_nothing_up() -> None:
    scheduler = FairScheduler(QUANTUM)
    for name in ("here", "away"):
        scheduler.add(name)
    for _ in range(50):
        assert scheduler.next_run({"here": 500}) == "here"
        scheduler.charge("here", 500)
    order = []
    for _ in range(8):
        chosen = scheduler.next_run({"here": 500, "away": 500})
        assert chosen is not None
        order.append(chosen)
        scheduler.charge(chosen, 500)
    assert order.count("away") == 4


def test_runs_come_and_go() -> None:
    scheduler = FairScheduler(QUANTUM)
    assert scheduler.next_run({}) is None
    scheduler.add("one")
    assert scheduler.next_run({}) is None
    assert scheduler.next_run({"one": 10}) == "one"
    scheduler.add("two")
    scheduler.charge("one", 2 * QUANTUM)
    scheduler.charge("one", QUANTUM)
    assert scheduler.next_run({"one": 10, "two": 10}) == "two"
    assert scheduler.used_share("one") == 1.0
    assert scheduler.used_share("being made") == 0.0
    scheduler.remove("two")
    assert scheduler.next_run({"one": 10}) == "one"
