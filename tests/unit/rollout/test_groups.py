"""The table of groups: admission, order, counting."""

from collections.abc import Sized

import pytest
from prometheus_client import CollectorRegistry

from meshrl.rollout.groups import MAX_RUNS, RATE_WINDOW_S, REMEMBERED_S, GroupTable, Outcome
from meshrl.rollout.metrics import RolloutMetrics
from meshrl.wire.errors import MeshError, Reason


def table(running: int = 2, queued: int = 4) -> GroupTable:
    return GroupTable(max_concurrent=running, max_queued=queued)


def test_rollouts_start_oldest_group_first_up_to_the_limit():
    groups = table(running=3)
    groups.admit("r1", "g1", 2, now=0.0)
    groups.admit("r2", "g2", 2, now=0.0)
    assert [(group.group_id, index) for group, index in groups.start()] == [("g1", 0), ("g1", 1), ("g2", 0)]
    assert (groups.running, groups.queued) == (3, 1)
    assert groups.start() == []


def test_a_free_slot_starts_the_next_waiting_rollout():
    groups = table(running=1)
    group = groups.admit("r1", "g1", 2, now=0.0)
    groups.start()
    assert groups.record_outcome(group, 0, Outcome.FINISHED, 1.0, sampled_tokens=5)
    assert groups.start() == [(group, 1)]


def test_a_group_that_does_not_fit_the_queue_is_refused_and_leaves_no_trace():
    groups = table(running=2, queued=2)
    groups.admit("r1", "g1", 3, now=0.0)
    with pytest.raises(MeshError) as refused:
        groups.admit("r2", "g2", 2, now=0.0)
    assert refused.value.reason is Reason.OVERLOADED
    assert refused.value.retry_after_s == 1.0
    assert groups.running + groups.queued == 3
    groups.admit("r2", "g2", 1, now=0.0)


def test_a_group_larger_than_the_server_is_invalid():
    with pytest.raises(MeshError) as refused:
        table(running=2, queued=2).admit("r1", "g1", 5, now=0.0)
    assert refused.value.reason is Reason.INVALID_REQUEST


def test_a_request_id_is_refused_while_it_is_remembered_and_then_forgotten():
    groups = table()
    group = groups.admit("r1", "g1", 1, now=0.0)
    groups.end(group, Outcome.CANCELLED, 1.0)
    groups.remove(group)
    with pytest.raises(MeshError) as refused:
        groups.admit("r1", "g2", 1, now=599.0)
    assert refused.value.reason is Reason.DUPLICATE_REQUEST
    groups.admit("r1", "g2", 1, now=601.0)


def test_a_group_id_is_refused_while_its_group_runs_only():
    groups = table()
    group = groups.admit("r1", "g1", 1, now=0.0)
    with pytest.raises(MeshError) as refused:
        groups.admit("r2", "g1", 1, now=0.0)
    assert refused.value.reason is Reason.DUPLICATE_REQUEST
    groups.end(group, Outcome.CANCELLED, 1.0)
    groups.remove(group)
    groups.admit("r2", "g1", 1, now=1.0)


def test_draining_refuses_new_groups():
    groups = table()
    groups.draining = True
    with pytest.raises(MeshError) as refused:
        groups.admit("r1", "g1", 1, now=0.0)
    assert refused.value.reason is Reason.DRAINING


def test_an_outcome_after_the_end_is_not_counted_again():
    groups = table(running=1)
    group = groups.admit("r1", "g1", 2, now=0.0)
    groups.start()
    assert groups.end(group, Outcome.FAILED, 1.0, reason="DEADLINE_PASSED") == ([0], [1])
    assert not groups.record_outcome(group, 0, Outcome.FINISHED, 2.0)
    assert group.over
    assert (group.summary.finished, group.summary.failed, group.summary.cancelled) == (0, 2, 0)
    assert groups.failures == {"DEADLINE_PASSED": 2}


def test_the_rate_covers_the_last_minute():
    groups = table()
    group = groups.admit("r1", "g1", 2, now=0.0)
    groups.start()
    groups.record_outcome(group, 0, Outcome.FINISHED, 0.0)
    groups.record_outcome(group, 1, Outcome.FINISHED, 30.0)
    assert groups.rate(50.0) == pytest.approx(2 / 60)
    assert groups.rate(70.0) == pytest.approx(1 / 60)
    assert groups.finished == 2


def test_what_is_remembered_of_groups_that_are_over_is_bounded_though_nobody_asks_for_the_status():
    groups = table()
    for number in range(20_000):  # a group a second
        group = groups.admit(f"r{number}", f"g{number}", 1, now=float(number))
        groups.start()
        groups.record_outcome(group, 0, Outcome.FINISHED, float(number))
        groups.remove(group)
    held = {name: len(value) for name, value in vars(groups).items() if isinstance(value, Sized)}
    assert groups.finished == 20_000
    assert max(held.values()) <= REMEMBERED_S + 1
    assert held["_finished_at"] <= RATE_WINDOW_S + 1


def test_a_flood_of_one_run_leaves_the_others_their_share() -> None:
    groups = GroupTable(max_concurrent=6, max_queued=100)
    flood = groups.admit("r1", "g1", 60, 0.0, "flood")
    groups.start()
    late = [groups.admit(f"r{run}", f"g{run}", 20, 0.0, run) for run in ("a", "b")]
    for turn in range(30):
        playing = [group for group in (flood, *late) if group.running]
        ends = playing[turn % len(playing)]
        groups.record_outcome(ends, min(ends.running), Outcome.FINISHED, 1.0)
        groups.start()
    assert [len(group.running) for group in (flood, *late)] == [2, 2, 2]
    assert all(len(group.waiting) <= 12 for group in late)  # each has had its third of the places


def test_a_run_beyond_its_own_limit_is_refused_and_the_others_are_not() -> None:
    groups = GroupTable(max_concurrent=4, max_queued=100, max_per_run=6)
    groups.admit("r1", "g1", 6, 0.0, "a")
    with pytest.raises(MeshError, match="6 rollouts of run 'a' run or wait; 1 more exceed max_concurrent_per_run 6"):
        groups.admit("r2", "g2", 1, 0.0, "a")
    groups.admit("r3", "g3", 6, 0.0, "b")


def test_the_rollouts_of_each_run_and_the_reasons_of_failures_are_counted_for_prometheus():
    groups = table(running=2, queued=6)
    a = groups.admit("r1", "g1", 3, now=0.0, run_id="a")
    groups.admit("r2", "g2", 1, now=0.0, run_id="b")
    groups.start()
    groups.record_outcome(a, 0, Outcome.FINISHED, 1.0)
    groups.end(a, Outcome.FAILED, 2.0, reason="DEADLINE_EXCEEDED")
    registry = CollectorRegistry()
    registry.register(RolloutMetrics(groups))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"meshrl_rollouts_{name}", labels)

    assert (value("running", run="a"), value("waiting", run="a")) == (0, 0)
    assert value("running", run="b") == 1
    assert value("ended_total", run="a", outcome="finished") == 1
    assert value("ended_total", run="a", outcome="failed") == 2
    assert value("failed_total", reason="DEADLINE_EXCEEDED") == 2


def test_no_more_runs_are_counted_apart_than_a_hub_takes():
    groups = table(queued=4)
    for number in range(MAX_RUNS + 5):
        group = groups.admit(f"r{number}", f"g{number}", 1, now=0.0, run_id=f"run{number}")
        groups.end(group, Outcome.CANCELLED, 1.0)
        groups.remove(group)
    assert len(groups.ended_of) == MAX_RUNS
    assert "run0" not in groups.ended_of
