from collections import Counter

import pytest

from meshrl.orchestrator.work.plan import TaskSchedule, TrainSource


def source(name: str, ratio: float = 1.0, tasks: int | None = 5) -> TrainSource:
    return TrainSource(environment=name, ratio=ratio, num_tasks=tasks)


def test_each_epoch_visits_every_task_once_in_its_own_order() -> None:
    schedule = TaskSchedule([source("echo", tasks=20)], seed=1)
    first = [schedule.next_task().index for _ in range(20)]
    second = [schedule.next_task().index for _ in range(20)]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first != list(range(20))


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    def draw(seed: int) -> list[tuple[str, int]]:
        schedule = TaskSchedule([source("echo", 3, 30), source("math", 1, 7)], seed=seed)
        return [(task.environment, task.index) for task in (schedule.next_task() for _ in range(50))]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_environments_are_mixed_by_ratio() -> None:
    schedule = TaskSchedule([source("a", 3), source("b", 1)], seed=0)
    assert Counter(schedule.next_task().environment for _ in range(40)) == {"a": 30, "b": 10}


def test_an_infinite_taskset_is_walked_from_its_start() -> None:
    schedule = TaskSchedule([source("stream", tasks=None)], seed=0)
    assert [schedule.next_task().index for _ in range(4)] == [0, 1, 2, 3]
    assert schedule.epochs() == {}


def test_epochs_count_passes_over_finite_environments() -> None:
    schedule = TaskSchedule([source("echo", tasks=4)], seed=0)
    for _ in range(6):
        schedule.next_task()
    assert schedule.epochs() == {"echo": 1.5}


def test_an_empty_taskset_is_refused() -> None:
    with pytest.raises(ValueError, match="environment 'a' has no tasks"):
        TaskSchedule([source("a", tasks=0)], seed=0)


def drawn_with_half_of_b_lost(schedule: TaskSchedule, draws: int) -> Counter[str]:
    """Groups that come to something, where every other group of b does not."""
    kept: Counter[str] = Counter()
    lost = 0
    for _ in range(draws):
        environment = schedule.next_task().environment
        lost += environment == "b"
        if environment == "b" and lost % 2:
            schedule.give_back("b")
        else:
            kept[environment] += 1
    return kept


def test_what_came_to_nothing_is_made_up_for_where_the_mixture_is_followed() -> None:
    sources = [source("a", 1), source("b", 1)]
    assert drawn_with_half_of_b_lost(TaskSchedule(sources, seed=0), 60) == {"a": 30, "b": 15}
    assert drawn_with_half_of_b_lost(TaskSchedule(sources, seed=0, follow_mixture=True), 60) == {"a": 20, "b": 20}


def test_an_environment_without_signal_takes_four_times_its_share_and_no_more() -> None:
    schedule = TaskSchedule([source("a", 9), source("b", 1)], seed=0, follow_mixture=True)
    drawn = Counter()
    for _ in range(100):
        environment = schedule.next_task().environment
        drawn[environment] += 1
        if environment == "b":
            schedule.give_back("b")
    assert drawn == {"a": 60, "b": 40}


def test_a_run_that_goes_on_follows_the_mixture_from_there() -> None:
    schedule = TaskSchedule([source("a", 1), source("b", 1)], seed=0, follow_mixture=True)
    schedule.skip({"a": 10, "b": 70})
    assert Counter(schedule.next_task().environment for _ in range(10)) == {"a": 5, "b": 5}
    assert schedule.drawn() == {"a": 15, "b": 75}
