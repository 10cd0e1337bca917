from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest

from meshrl.orchestrator.work.plan import PlanLimits, StalenessLaw, TaskSchedule, TrainSource, WorkPlan
from meshrl.orchestrator.work.screening import DropReason, screen_finished
from meshrl.sampling.groups import RolloutGroup


@pytest.fixture
def make_plan() -> Callable[..., WorkPlan]:
    def make(
        *,
        level: int,
        groups: int = 2,
        off_policy: int = 8,
        last_step: int | None = None,
        cap: int = 99,
        seed: int | None = 0,
        sizes: Mapping[str, int] = MappingProxyType({"echo": 2}),
    ) -> WorkPlan:
        return WorkPlan(
            law=StalenessLaw(max_async_level=level, max_off_policy_steps=off_policy),
            limits=PlanLimits(
                batch_size=2 * groups,
                group_sizes=sizes,
                least_rollouts=dict.fromkeys(sizes, 2),
                max_zero_signal_groups=99,
                max_inflight_rollouts=2 * cap,
                last_step=last_step,
            ),
            schedule=TaskSchedule([TrainSource(environment=name, ratio=1, num_tasks=None) for name in sizes], seed=0),
            screen=lambda _, rollouts: screen_finished(
                rollouts, drop_empty=True, drop_zero_signal=True, tolerance=1e-8, least=2
            ),
            next_step=1,
            active_version=0,
            seed=seed,
        )

    return make


def dispatch_all(plan: WorkPlan, prefix: str) -> list[str]:
    names: list[str] = []
    while plan.dispatch(f"{prefix}{len(names)}") is not None:
        names.append(f"{prefix}{len(names)}")
    return names


@pytest.fixture
def finish(make_rollout) -> Callable[..., RolloutGroup]:
    def finish(
        plan: WorkPlan, group_id: str, *, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)
    ) -> RolloutGroup:
        ticket = plan._in_flight[group_id]
        rollouts = [
            make_rollout(f"{group_id}/{index}", reward=reward, version=version, group_id=group_id)
            for index, reward in enumerate(rewards)
        ]
        group = RolloutGroup(ticket=ticket, rollouts=rollouts)
        plan.finish(group)
        return group

    return finish


@pytest.mark.parametrize(("level", "groups_before_any_training"), [(0, 2), (1, 4), (2, 6)])
def test_generation_opens_one_more_step_a_level(make_plan, level: int, groups_before_any_training: int) -> None:
    assert len(dispatch_all(make_plan(level=level), "g")) == groups_before_any_training


def test_level_zero_generates_nothing_between_a_batch_and_its_version(make_plan, finish) -> None:
    plan = make_plan(level=0)
    for name in dispatch_all(plan, "g"):
        finish(plan, name)
    assert len(plan.take()) == 2
    assert plan.room() == 0
    plan.activated(1)
    assert plan.room() == 4
    assert plan.dispatch("next").min_version == 1


def test_level_one_generates_the_next_step_while_the_first_trains(make_plan, finish) -> None:
    plan = make_plan(level=1)
    for name in dispatch_all(plan, "g"):
        finish(plan, name)
    plan.take()
    assert plan.room() == 0
    assert plan.ready == 2
    plan.take()
    plan.activated(1)
    assert plan.room() == 4


def test_a_zero_signal_group_frees_its_slot_and_is_counted(make_plan, finish) -> None:
    plan = make_plan(level=0)
    first, second = dispatch_all(plan, "g")
    finish(plan, first, rewards=(1.0, 1.0))
    assert plan.zero_signal_in_a_row == 1
    assert plan.room() == 2
    finish(plan, second)
    assert plan.zero_signal_in_a_row == 0


def test_the_first_dispatched_ready_groups_are_taken_first(make_plan, finish) -> None:
    plan = make_plan(level=1)
    dispatch_all(plan, "g")
    for name in ("g3", "g1", "g0"):
        finish(plan, name)
    assert [group.ticket.group_id for group in plan.take()] == ["g0", "g1"]


def test_what_is_too_old_for_the_next_step_is_dropped(make_plan, finish) -> None:
    plan = make_plan(level=1, off_policy=0)
    for name in dispatch_all(plan, "g"):
        finish(plan, name, version=0)
    assert plan.drop_stale() == []
    plan.take()
    assert [reason for _, reason in plan.drop_stale()] == [DropReason.STALE] * 4
    assert plan.ready == 0


def test_groups_in_flight_from_a_version_too_old_are_doomed(make_plan, finish) -> None:
    plan = make_plan(level=1, off_policy=0)
    dispatch_all(plan, "g")
    assert plan.stale_in_flight() == []
    finish(plan, "g0")
    finish(plan, "g1")
    plan.take()
    assert plan.stale_in_flight() == ["g2", "g3"]


def test_nothing_is_generated_beyond_the_last_step(make_plan, finish) -> None:
    plan = make_plan(level=2, last_step=1)
    names = dispatch_all(plan, "g")
    assert len(names) == 2
    for name in names:
        finish(plan, name)
    plan.take()
    assert plan.exhausted
    assert plan.room() == 0


def test_groups_in_flight_are_capped(make_plan) -> None:
    assert len(dispatch_all(make_plan(level=2, cap=3), "g")) == 3


def test_without_a_seed_groups_have_none_and_neither_has_what_completes_them(make_plan) -> None:
    ticket = make_plan(level=0, seed=None).dispatch("g0")
    assert ticket.seed is None
    assert ticket.for_missing(1, reseeds=1).seed is None


def test_groups_of_two_sizes_fill_a_batch_with_whole_groups_and_less_than_one_beyond(make_plan, finish) -> None:
    plan = make_plan(level=0, groups=6, sizes={"small": 2, "large": 6})
    names = dispatch_all(plan, "g")
    sizes = [plan._in_flight[name].size for name in names]
    assert sizes == [2, 6, 2, 6], "the first three leave two slots open, which the fourth goes beyond"
    seeds = [plan._in_flight[name].seed for name in names]
    assert seeds == [0, 6, 12, 18]
    for name in reversed(names):
        assert plan.take() is None
        finish(plan, name)
    assert [group.ticket.group_id for group in plan.take()] == names
    assert plan.in_flight + plan.ready == 0
    plan.activated(1)
    assert plan.room() == 12


def test_a_step_leaves_to_the_next_what_it_does_not_need(make_plan, finish) -> None:
    plan = make_plan(level=1, groups=6, sizes={"small": 2, "large": 6})
    names = dispatch_all(plan, "g")
    assert [plan._in_flight[name].for_step for name in names] == [1, 1, 1, 1, 2, 2]
    for name in names[1:]:
        finish(plan, name)
    assert [group.ticket.group_id for group in plan.take()] == names[1:4]
    assert plan.ready == 2
    assert plan.room() == 2, "the first and those two hold ten slots of twelve"
