from collections.abc import Callable
from dataclasses import replace

import pytest

from meshrl.orchestrator import dispatch
from meshrl.orchestrator.dispatch import LengthEstimates
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef


@pytest.fixture
def group_of(make_group, make_rollout) -> Callable[..., RolloutGroup]:
    def group_of(environment: str, index: int, *lengths: int) -> RolloutGroup:
        ticket = replace(make_group(environment=environment).ticket, task=TaskRef(environment=environment, index=index))
        rollouts = [make_rollout(f"r{place}", sampled=length) for place, length in enumerate(lengths)]
        return RolloutGroup(ticket=ticket, rollouts=rollouts)

    return group_of


def ticket_of(group: RolloutGroup, for_step: int) -> GroupTicket:
    return replace(group.ticket, for_step=for_step)


def test_a_task_is_expected_to_be_as_long_as_the_longest_rollout_of_its_last_group(group_of) -> None:
    estimates = LengthEstimates()
    estimates.observe(group_of("echo", 3, 10, 40, 20))
    estimates.observe(group_of("echo", 3, 10, 30))
    assert estimates.expected(TaskRef(environment="echo", index=3)) == 30.0


def test_an_unseen_task_is_expected_to_be_as_long_as_its_environments_on_average(group_of) -> None:
    estimates = LengthEstimates()
    unseen = TaskRef(environment="echo", index=9)
    assert estimates.expected(unseen) == 0.0
    estimates.observe(group_of("echo", 1, 10))
    estimates.observe(group_of("echo", 2, 30))
    estimates.observe(group_of("essay", 2, 500))
    assert estimates.expected(unseen) == 20.0
    for _ in range(200):
        estimates.observe(group_of("echo", 2, 100))
    assert estimates.expected(unseen) == pytest.approx(100.0, rel=0.01)


def test_a_group_without_rollouts_says_nothing(group_of) -> None:
    estimates = LengthEstimates()
    estimates.observe(group_of("echo", 1))
    assert estimates.expected(TaskRef(environment="echo", index=1)) == 0.0


def test_the_longest_come_first_within_their_step_and_equals_as_they_came(group_of) -> None:
    estimates = LengthEstimates()
    for group in (group_of("echo", 1, 10), group_of("echo", 2, 90), group_of("echo", 3, 50), group_of("math", 1, 90)):
        estimates.observe(group)
    tickets = [
        ticket_of(group_of(*task), step)
        for task, step in ((("echo", 1), 4), (("echo", 3), 4), (("echo", 2), 4), (("math", 1), 4), (("echo", 2), 5))
    ] + [ticket_of(group_of("echo", 1), 3)]
    ordered = [(t.for_step, t.task.environment, t.task.index) for t in estimates.longest_first(tickets)]
    assert ordered == [
        (3, "echo", 1), (4, "echo", 2), (4, "math", 1), (4, "echo", 3), (4, "echo", 1), (5, "echo", 2),
    ]  # fmt: skip


def test_what_is_remembered_of_tasks_that_never_come_again_is_bounded(group_of, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "REMEMBERED_TASKS", 100)
    estimates = LengthEstimates()
    for index in range(300):
        estimates.observe(group_of("endless", index, index + 1))
    assert len(estimates._of_task) == 100
    assert estimates.expected(TaskRef(environment="endless", index=299)) == 300.0
