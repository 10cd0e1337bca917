"""The table of groups: admission, order, counting."""

import asyncio
from collections.abc import Sized
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from meshrl.rollout.engines.capacity import RolloutLimit
from meshrl.rollout.engines.engine_table import EngineTable
from meshrl.rollout.groups import MAX_RUNS, RATE_WINDOW_S, Admissions, Outcome
from meshrl.rollout.metrics import RolloutMetrics
from meshrl.rollout.runner import RolloutRunner
from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.repeated_requests import REMEMBERED_S
from meshrl.wire.types import EnvironmentInfo, RolloutRequest


def asked(request_id: str, group_id: str, size: int, run_id: str = "") -> RolloutRequest:
    return RolloutRequest(
        request_id=request_id, group_id=group_id, environment="e", group_size=size, deadline_s=60.0, run_id=run_id
    )


def table(running: int = 2, queued: int = 4) -> Admissions:
    return Admissions(max_concurrent=running, max_queued=queued)


def test_rollouts_start_oldest_group_first_up_to_the_limit():
    groups = table(running=3)
    groups.admit(asked("r1", "g1", 2), 0.0)
    groups.admit(asked("r2", "g2", 2), 0.0)
    assert [(group.request.group_id, index) for group, index in groups.start()] == [("g1", 0), ("g1", 1), ("g2", 0)]
    assert (groups.running, groups.queued) == (3, 1)
    assert groups.start() == []


def test_a_group_larger_than_the_server_is_invalid():
    with pytest.raises(MeshError) as refused:
        table(running=2, queued=2).admit(asked("r1", "g1", 5), 0.0)
    assert refused.value.reason is Reason.INVALID_REQUEST


def test_a_request_id_is_refused_while_it_is_remembered_and_then_forgotten():
    groups = table()
    group = groups.admit(asked("r1", "g1", 1), 0.0)
    groups.end(group, Outcome.CANCELLED, 1.0)
    groups.remove(group)
    with pytest.raises(MeshError) as refused:
        groups.admit(asked("r1", "g2", 1), 599.0)
    assert refused.value.reason is Reason.DUPLICATE_REQUEST
    groups.admit(asked("r1", "g2", 1), 601.0)


def test_a_group_id_is_refused_while_its_group_runs_only():
    groups = table()
    group = groups.admit(asked("r1", "g1", 1), 0.0)
    with pytest.raises(MeshError) as refused:
        groups.admit(asked("r2", "g1", 1), 0.0)
    assert refused.value.reason is Reason.DUPLICATE_REQUEST
    groups.end(group, Outcome.CANCELLED, 1.0)
    groups.remove(group)
    groups.admit(asked("r2", "g1", 1), 1.0)


def test_the_rate_covers_the_last_minute():
    groups = table()
    group = groups.admit(asked("r1", "g1", 2), 0.0)
    groups.start()
    groups.record_outcome(group, 0, Outcome.FINISHED, 0.0)
    groups.record_outcome(group, 1, Outcome.FINISHED, 30.0)
    assert groups.rate(50.0) == pytest.approx(2 / 60)
    assert groups.rate(70.0) == pytest.approx(1 / 60)
    assert groups.finished == 2


def test_what_is_remembered_of_groups_that_are_over_is_bounded_though_nobody_asks_for_the_status():
    groups = table()
    for number in range(20_000):  # a group a second
        group = groups.admit(asked(f"r{number}", f"g{number}", 1), float(number))
        groups.start()
        groups.record_outcome(group, 0, Outcome.FINISHED, float(number))
        groups.remove(group)
    held = {name: len(value) for name, value in vars(groups).items() if isinstance(value, Sized)}
    assert groups.finished == 20_000
    assert max(held.values()) <= REMEMBERED_S + 1
    assert held["_finished_at"] <= RATE_WINDOW_S + 1


def test_a_flood_of_one_run_leaves_the_others_their_share() -> None:
    groups = Admissions(max_concurrent=6, max_queued=100)
    flood = groups.admit(asked("r1", "g1", 60, "flood"), 0.0)
    groups.start()
    late = [groups.admit(asked(f"r{run}", f"g{run}", 20, run), 0.0) for run in ("a", "b")]
    for turn in range(30):
        playing = [group for group in (flood, *late) if group.running]
        ends = playing[turn % len(playing)]
        groups.record_outcome(ends, min(ends.running), Outcome.FINISHED, 1.0)
        groups.start()
    assert [len(group.running) for group in (flood, *late)] == [2, 2, 2]
    assert all(len(group.waiting) <= 12 for group in late)  # each has had its third of the places


def test_a_run_beyond_its_own_limit_is_refused_and_the_others_are_not() -> None:
    groups = Admissions(max_concurrent=4, max_queued=100, max_per_run=6)
    groups.admit(asked("r1", "g1", 6, "a"), 0.0)
    with pytest.raises(MeshError, match="6 rollouts of run 'a' run or wait; 1 more exceed max_concurrent_per_run 6"):
        groups.admit(asked("r2", "g2", 1, "a"), 0.0)
    groups.admit(asked("r3", "g3", 6, "b"), 0.0)


async def test_a_run_at_its_limit_does_not_have_the_groups_of_another_run_refused() -> None:
    playing, gate = [], asyncio.Event()

    class Held:
        """Plays groups whose rollouts wait at the gate, and have no agent that trains."""

        info, late_s = EnvironmentInfo(name="e", taskset="e", num_tasks=1), 0.0

        async def open(self, request: RolloutRequest) -> "Held":
            return self

        async def play(self, index: int) -> tuple[()]:
            playing.append(index)
            await gate.wait()
            return ()

        def close(self) -> None:
            pass

    async def require(need: object) -> None:
        pass

    servers, limit = SimpleNamespace(engines=EngineTable([]), require=require, on_look=None), RolloutLimit(8)
    groups = Admissions(max_concurrent=8, max_queued=8, max_per_run=1)
    runner = RolloutRunner({"e": Held()}, groups, servers, limit)
    events: list[bytes] = []
    async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
        tasks.create_task(runner.run(asked("r1", "g1", 1), events.append))
        while not playing:  # noqa: ASYNC110  # the runner starts it in one of the next rounds
            await asyncio.sleep(0.0)
        tasks.create_task(runner.run(asked("r2", "g2", 1, "b"), events.append))
        while len(playing) < 2:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.0)
        gate.set()
    assert [pb.RunRolloutsResponse.FromString(event).summary.finished for event in events] == [1, 1]


def test_the_rollouts_of_each_run_and_the_reasons_of_failures_are_counted_for_prometheus():
    groups = table(running=2, queued=6)
    a = groups.admit(asked("r1", "g1", 3, "a"), 0.0)
    groups.admit(asked("r2", "g2", 1, "b"), 0.0)
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
        group = groups.admit(asked(f"r{number}", f"g{number}", 1, f"run{number}"), 0.0)
        groups.end(group, Outcome.CANCELLED, 1.0)
        groups.remove(group)
    assert len(groups.ended_of) == MAX_RUNS
    assert "run0" not in groups.ended_of
