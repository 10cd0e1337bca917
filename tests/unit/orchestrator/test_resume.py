from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshrl.orchestrator.ledger.resume import ResumePlan, goes_on, plan_resume
from meshrl.orchestrator.ledger.rows import Past, RunRow, StepRecord
from meshrl.orchestrator.ledger.rules import LedgerEntry, RolloutState
from meshrl.orchestrator.work.screening import DropReason, RunTotals

RUN = RunRow(run=1, run_id="main", session="s", epoch=3, first_step=1, metrics_offset=0)


def entry(name: str, state: str, step: int | None = None) -> LedgerEntry:
    group, _, _ = name.partition("/")
    return LedgerEntry(
        key=name,
        group_id=group,
        environment="echo",
        task_index=0,
        for_step=1,
        state=RolloutState(state),
        rollout_id="" if state == "dispatched" else name,
        step=step,
    )


def step_record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        digest="",
        groups=(),
        advantages={},
        untrainable=(),
        truncated_samples=0,
        dropped_samples=0,
        longest_row=48,
        dp_size=2,
        progress=RunTotals(),
        drawn={},
    )


@pytest.fixture
def past(make_group) -> Callable[..., Past]:
    def make(entries: list[LedgerEntry], *, over: str = "", kept: tuple[int, ...] = (), lost: str = "") -> Past:
        names = sorted({one.group_id for one in entries})
        return Past(
            run=RUN,
            entries=tuple(entries),
            groups={name: make_group(name) for name in names},
            in_flight=frozenset(names) - set(over.split()),
            steps={step: step_record(step) for step in kept},
            kept=frozenset(kept),
            payloads=frozenset(one.rollout_id for one in entries) - set(lost.split()),
        )

    return make


def planned(past: Past, step: int, **other: Any) -> ResumePlan:
    settings = {"logged_step": 0, "dp_size": 2, "seq_len": 48, "environments": {"echo": 2}}
    return plan_resume(past, trainer_step=step, **settings | other)


def test_what_the_trainer_did_is_trained_and_what_it_did_not_is_submitted_again(past) -> None:
    left = [entry(f"g{step}/0", "batched", step) for step in (1, 2, 3)]
    plan = planned(past(left, over="g1 g2 g3", kept=(1, 2, 3)), 1)
    assert (plan.trained, plan.again, plan.released, plan.unlogged) == ((1,), (2, 3), (), (1,))


def test_a_batch_after_a_gap_or_too_large_gives_its_rollouts_back(past) -> None:
    left = [entry(f"g{step}/{place}", "trained", step) for step in (2, 4) for place in (0, 1)]
    gap = planned(past(left, over="g2 g4", kept=(2, 4)), 1)
    assert (gap.again, gap.released) == ((2,), (4,))
    assert gap.ready == (("g4", ("g4/0", "g4/1")),)
    for other in ({"dp_size": 1}, {"seq_len": 47}):  # of the trainer, since the batch was made
        unfit = planned(past(left, over="g2 g4", kept=(2, 4)), 1, **other)
        assert (unfit.again, unfit.released) == ((), (2, 4))
        assert {group for group, _ in unfit.ready} == {"g2", "g4"}


def test_a_run_that_ends_earlier_than_before_submits_no_batch_beyond_its_last_step(past) -> None:
    left = [entry(f"g{step}/{place}", "batched", step) for step in (1, 2, 3) for place in (0, 1)]
    plan = planned(past(left, over="g1 g2 g3", kept=(1, 2, 3)), 0, last_step=2)
    assert (plan.again, plan.released, plan.ready) == ((1, 2), (3,), (("g3", ("g3/0", "g3/1")),))


def test_of_a_cut_off_group_what_has_not_come_back_is_sampled_with_other_seeds_and_nothing_is_dropped(past) -> None:
    left = [entry(f"g1/{place}", "finished") for place in range(3)] + [entry("g1/3", "dispatched")]
    left += [entry("g2/0", "finished"), *(entry(f"g2/{place}", "dispatched") for place in (1, 2, 3))]
    left += [entry(f"g3/{place}", "dispatched") for place in range(4)]
    left += [entry(f"g4/{place}", "finished") for place in range(4)]  # whole, but not closed
    plan = planned(past(left), 0)
    assert plan.interrupted == ("g1", "g2", "g3", "g4")
    assert plan.dropped == ()
    assert plan.ready == (("g4", ("g4/0", "g4/1", "g4/2", "g4/3")),)
    assert [(one.group_id, one.size, one.seed) for one in plan.redispatch] == [
        ("g1", 1, 2**31),
        ("g2", 3, 2**31),
        ("g3", 4, 0),
    ]
    assert dict(plan.carried) == {"g1": ("g1/0", "g1/1", "g1/2"), "g2": ("g2/0",)}


def test_a_group_that_was_being_completed_is_completed_with_all_that_came_back_before(past) -> None:
    left = [
        entry("g1/0", "finished"),
        *(entry(f"g2/{place}", "finished") for place in (0, 1)),
        entry("g2/2", "dispatched"),
    ]
    twice = replace(past(left, over="g1"), successors={"g1": "g2"})
    plan = planned(twice, 0)
    assert [(one.group_id, one.size) for one in plan.redispatch] == [("g2", 2)]
    assert dict(plan.carried) == {"g2": ("g1/0", "g2/0", "g2/1")}
    whole = planned(replace(past(left[:3], over="g1 g2"), successors={"g1": "g2"}), 0)
    assert (whole.ready, whole.redispatch) == ((("g2", ("g1/0", "g2/0", "g2/1")),), ())


def test_what_an_undone_step_took_of_a_completed_group_is_one_group_again(past) -> None:
    left = [entry("g1/0", "trained", 2), entry("g2/0", "trained", 2)]
    plan = planned(replace(past(left, over="g1 g2"), successors={"g1": "g2"}), 1)
    assert (plan.released, plan.ready) == ((2,), (("g2", ("g1/0", "g2/0")),))


def test_rollouts_without_payload_or_environment_are_dropped_with_a_reason(past) -> None:
    left = [entry("g1/0", "trained", 2), entry("g1/1", "trained", 2), entry("g2/0", "finished")]
    plan = planned(past(left, over="g1 g2", lost="g1/0 g1/1"), 1)
    assert set(plan.dropped) == {
        ("g1/0", DropReason.UNDONE),
        ("g1/1", DropReason.UNDONE),
        ("g2/0", DropReason.GROUP_LOST),
    }
    elsewhere = planned(past(left, over="g1 g2"), 1, environments={"math": 2})
    assert {reason for _, reason in elsewhere.dropped} == {DropReason.REMOVED}


@pytest.mark.parametrize(
    ("told", "goes"),
    [
        ({"epoch": 3}, True),
        ({"epoch": 4}, False),
        ({"epoch": 4, "trainer_step": 2}, True),
        ({"epoch": 4, "session": "s"}, True),
        ({"epoch": 3, "run_id": "other"}, False),
    ],
)
def test_a_run_goes_on_with_a_trainer_that_knows_it(told: dict, goes: bool) -> None:
    known = {"run_id": "main", "session": "", "trainer_step": 0} | told
    assert goes_on(RUN, **known) is goes
