"""Environments in worker processes: what dies, blocks or hangs there costs its own rollouts, and says so."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger

from meshrl.rollout.workers import fleet
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Rollout, RolloutFailure, RolloutSummary, Sampling
from polling import until

PATIENCE_S = 120.0
"""For a machine that is ten times slower, or stands still for a while."""

STANDS_BY = "worker 2 has loaded mesh_echo, {}"


@pytest.fixture
def slow_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a worker stands still for seconds, in the code of whichever environment runs then."""
    monkeypatch.setattr(fleet, "LEFT_AFTER_S", 8.0)


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end, a worker that is blocked is killed at once."""
    monkeypatch.setattr(fleet, "STOP_GRACE_S", 0.0)


def zoo(kind, **options):
    """An environment in which every reward goes wrong in this way."""
    return {"id": "mesh_zoo", "name": kind, "args": {"kind": kind, "seconds": 3600.0}, **options}


class Said(list):
    """Lines of a log, some of which a test waits for."""

    def __init__(self):
        super().__init__()
        self._more = asyncio.Event()

    def add(self, line):
        self.append(line)
        self._more.set()

    async def until(self, line):
        async with asyncio.timeout(PATIENCE_S):
            while line not in self:
                self._more.clear()
                await self._more.wait()


@pytest.fixture
def said() -> Iterator[Said]:
    """What the front logs about environments."""
    lines = Said()
    sink = logger.add(lambda message: lines.add(message.record["message"]), level="INFO")
    yield lines
    logger.remove(sink)


class Gate:
    """Holds the model calls of healthy rollouts until it is opened; calls of others pass."""

    def __init__(self, engine, tokens):
        self.opened, self.held = asyncio.Event(), asyncio.Queue()
        self._mark = tokens("Say it back.")
        engine.on_call = self

    async def __call__(self, request, body):
        prompt = body["token_ids"]
        if any(prompt[at : at + len(self._mark)] == self._mark for at in range(len(prompt))):
            self.held.put_nowait(None)
            await self.opened.wait()


async def test_workers_play_as_the_service_itself_does(start_mesh, engine, make_group):
    engine.version, engine.spans = 4, lambda n: [[0, n, 4]]
    env = [{"id": "mesh_echo"}, {"id": "mesh_debate"}]
    alone = await start_mesh([engine], env=env)
    mesh = await start_mesh([engine], env=env, workers=2, max_concurrent=2)
    assert await mesh.client.list_environments() == await alone.client.list_environments()
    for fields in ({"group_size": 4}, {"environment": "mesh_debate"}):
        fields |= {"deadline_s": PATIENCE_S, "sampling": Sampling(seed=100)}
        here = await alone.collect(make_group(**fields))
        seeds = [body["sampling_params"]["seed"] for body in engine.requests]
        engine.requests.clear()
        there = await mesh.collect(make_group(**fields))
        assert sorted(body["sampling_params"]["seed"] for body in engine.requests) == sorted(seeds)
        engine.requests.clear()
        assert there[-1] == here[-1]
        assert [(event.agent, event.reward, event.samples[0].token_ids.tolist()) for event in there[:-1]] == [
            (event.agent, event.reward, event.samples[0].token_ids.tolist()) for event in here[:-1]
        ]
        assert all(event.samples[0].version_spans[0].version == 4 for event in there[:-1])


async def test_a_worker_finds_a_version_that_came_after_its_last_look_at_the_engines(start_mesh, engine, make_group):
    engine.version = 5
    mesh = await start_mesh([engine], workers=1, client={"probe_interval_s": 3600.0})
    for version, bound in ((6, {"min_version": 6}), (7, {"exact_version": 7})):
        engine.version = version
        rollout, _ = await mesh.collect(make_group(deadline_s=PATIENCE_S, **bound))
        assert rollout.oldest_version == version


async def test_what_ends_a_shared_worker_fails_and_moves_out_and_the_standby_plays_the_others_again(
    start_mesh, engine, make_group, tokens, said
):
    kind, words = "dies", r"environment dies: its worker \d ended with exit code 7"
    gate = Gate(engine, tokens)
    mesh = await start_mesh([engine], env=[{"id": "mesh_echo"}, zoo(kind)], workers=1)
    await said.until(STANDS_BY.format(kind))
    healthy = asyncio.create_task(mesh.collect(make_group(group_size=2, deadline_s=PATIENCE_S)))
    await gate.held.get()
    await gate.held.get()
    failure, summary = await mesh.collect(make_group(environment=kind, deadline_s=PATIENCE_S))
    assert isinstance(failure, RolloutFailure)
    assert failure.reason == "ENVIRONMENT_FAILED"
    assert re.fullmatch(words, failure.message), failure.message
    assert summary == RolloutSummary(finished=0, failed=1, cancelled=0, sampled_tokens=0)
    gate.opened.set()
    *rollouts, summary = await healthy
    assert [type(rollout) for rollout in rollouts] == [Rollout, Rollout]
    assert summary.finished == 2
    assert any(f"environment {kind} gets worker 3 of its own" in line for line in said)
    assert "worker 2 takes the place of worker 1" in said
    assert not any(re.match("worker [12] has loaded", line) for line in said[said.index(STANDS_BY.format(kind)) + 1 :])


@pytest.mark.usefixtures("no_grace", "slow_to_blame")
async def test_others_leave_a_worker_that_one_blocks_for_the_standby_and_the_blocker_keeps_it(
    start_mesh, engine, make_group, tokens, said
):
    gate = Gate(engine, tokens)
    blocks = zoo("blocks", deadlines={"blocked_s": 3600.0})
    mesh = await start_mesh([engine], env=[{"id": "mesh_echo"}, blocks], workers=1, blocked_s=3600.0)
    await said.until(STANDS_BY.format("blocks"))
    healthy = asyncio.create_task(mesh.collect(make_group(group_size=2, deadline_s=PATIENCE_S)))
    await gate.held.get()
    await gate.held.get()
    blocking = asyncio.create_task(mesh.collect(make_group(environment="blocks", deadline_s=PATIENCE_S)))
    await gate.held.get()  # both are played once more, while the first worker stands still
    await gate.held.get()
    gate.opened.set()
    assert (await healthy)[-1].finished == 2
    assert (await mesh.collect(make_group(deadline_s=PATIENCE_S)))[-1].finished == 1
    assert not blocking.done()
    assert "worker 2 takes the place of worker 1" in said
    assert any("environment blocks keeps worker 1, which it blocks in go_wrong" in line for line in said)
    blocking.cancel()
    await asyncio.wait({blocking})


@pytest.mark.usefixtures("no_grace", "slow_to_blame")
async def test_others_leave_a_worker_that_stays_shared_for_another(start_mesh, engine, make_group, tokens):
    gate = Gate(engine, tokens)
    blocks = zoo("blocks", deadlines={"blocked_s": 3600.0})
    mesh = await start_mesh([engine], env=[{"id": "mesh_echo"}, blocks], workers=2, standby=False, blocked_s=3600.0)
    few, many = (
        asyncio.create_task(mesh.collect(make_group(group_size=size, deadline_s=PATIENCE_S))) for size in (1, 3)
    )
    for _ in range(4):
        await gate.held.get()
    blocking = asyncio.create_task(mesh.collect(make_group(environment="blocks", deadline_s=PATIENCE_S)))
    await gate.held.get()  # the one beside which the worker stands still is played once more, in the other worker
    gate.opened.set()
    assert [(await healthy)[-1].finished for healthy in (few, many)] == [1, 3]
    assert not blocking.done()
    blocking.cancel()
    await asyncio.wait({blocking})


async def test_what_blocks_the_only_worker_fails_and_gets_one_of_its_own(start_mesh, engine, make_group, said):
    env = [{"id": "mesh_echo"}, zoo("blocks")]
    mesh = await start_mesh([engine], env=env, workers=1, standby=False, blocked_s=1.0)
    failure, _ = await mesh.collect(make_group(environment="blocks", deadline_s=PATIENCE_S))
    words = (
        r"environment blocks: its worker 1 was replaced: its event loop was blocked for [\d.]+ s in go_wrong"
        r" \(mesh_zoo.py:\d+\)"
    )
    assert (failure.reason, bool(re.fullmatch(words, failure.message))) == ("ENVIRONMENT_FAILED", True), failure.message
    assert any("environment blocks gets worker 2 of its own" in line for line in said)


async def test_where_nobody_knows_whose_code_it_was_what_played_most_goes_on_in_the_standby(
    start_mesh, engine, make_group, tokens, said, monkeypatch
):
    monkeypatch.setattr(fleet, "LEFT_AFTER_S", PATIENCE_S)  # on a busy machine a worker stands still for seconds
    gate = Gate(engine, tokens)
    env = [{"id": "mesh_echo", "name": name} for name in ("few", "many")]
    before = await asyncio.to_thread(worker_pids)
    mesh = await start_mesh([engine], env=env, workers=1, blocked_s=PATIENCE_S)
    shared, *_ = [pid for pid in await asyncio.to_thread(worker_pids) if pid not in before]  # the standby comes later
    await said.until("worker 2 has loaded few, many")
    playing = [
        asyncio.create_task(mesh.collect(make_group(environment=name, group_size=size, deadline_s=PATIENCE_S)))
        for name, size in (("few", 1), ("many", 2))
    ]
    for _ in range(3):
        await gate.held.get()
    os.kill(shared, signal.SIGKILL)
    await said.until("worker 3 has loaded few")
    gate.opened.set()
    assert [(await group)[-1].finished for group in playing] == [1, 2]
    moves = [line.partition(",")[0] for line in said if "of its own" in line]
    assert moves == ["environment many gets worker 2 of its own", "environment few gets worker 3 of its own"]


async def test_a_hanging_rollout_is_given_up_at_its_stages_deadline_and_loses_its_place(start_mesh, engine, make_group):
    env = [{"id": "mesh_echo"}, zoo("hangs", deadlines={"scoring_s": 0.5})]
    mesh = await start_mesh([engine], env=env, workers=1, max_concurrent=1)
    hanging = asyncio.create_task(mesh.collect(make_group(environment="hangs", deadline_s=PATIENCE_S)))
    (rollout, _) = await mesh.collect(make_group(deadline_s=PATIENCE_S))
    assert isinstance(rollout, Rollout)
    failure, _ = await hanging
    assert failure.reason == "DEADLINE_PASSED"
    words = r"longer in one stage than deadlines.scoring_s = 0.5: it was in its rewards and metrics, [\d.]+ s .*"
    assert re.fullmatch(words, failure.message), failure.message
    assert (await mesh.client.get_status()).running == 0


async def test_an_exit_or_a_cancellation_of_the_environments_own_is_a_failure_of_its_rollout_alone(
    start_mesh, engine, make_group, said
):
    kinds = {
        "exits": "raised SystemExit('no more')",
        "exits in a task": "raised SystemExit('no more, from a task')",
        "cancels": "raised CancelledError()",
    }
    mesh = await start_mesh([engine], env=[{"id": "mesh_echo"}, *map(zoo, kinds)], workers=1, standby=False)
    for kind, words in kinds.items():
        failure, summary = await mesh.collect(make_group(environment=kind, deadline_s=PATIENCE_S))
        assert (failure.reason, summary.failed) == ("ENVIRONMENT_FAILED", 1)
        assert words in failure.message
        assert isinstance((await mesh.collect(make_group(deadline_s=PATIENCE_S)))[0], Rollout)
    assert not any("of its own" in line for line in said)


async def test_a_worker_that_takes_too_much_memory_is_replaced(start_mesh, engine, make_group):
    mesh = await start_mesh([engine], env=[zoo("grows", max_memory_mib=256)], workers=1)
    failure, _ = await mesh.collect(make_group(environment="grows", deadline_s=PATIENCE_S))
    assert (
        re.fullmatch(
            r"environment grows: its worker 1 was replaced: it took \d+ MiB of memory, and max_memory_mib is 256",
            failure.message,
        )
        or "MemoryError" in failure.message
    ), failure.message


async def test_a_killed_worker_costs_what_it_played_and_is_replaced(start_mesh, engine, make_group, tokens, tmp_path):
    gate = Gate(engine, tokens)
    before = await asyncio.to_thread(worker_pids)
    mesh = await start_mesh([engine], env=[{"id": "mesh_echo"}], workers=1)
    playing = asyncio.create_task(mesh.collect(make_group(group_size=2, deadline_s=PATIENCE_S)))
    await gate.held.get()
    await gate.held.get()
    (pid,) = {*await asyncio.to_thread(worker_pids)} - {*before}
    os.kill(pid, signal.SIGKILL)
    *failures, summary = await playing
    message = "environment mesh_echo: its worker 1 was killed by SIGKILL (9)"
    assert [failure.message for failure in failures] == [message] * 2
    assert summary.failed == 2
    gate.opened.set()
    assert isinstance((await mesh.collect(make_group(deadline_s=PATIENCE_S)))[0], Rollout)
    logs = tmp_path / "logs" / "envs" / "train" / "mesh_echo"
    assert sorted(path.name for path in logs.iterdir()) == ["env_server.log", "env_worker_1.log"]
    assert message in (logs / "env_server.log").read_text()


async def test_what_a_dead_worker_started_in_a_session_of_its_own_ends_too(start_mesh, engine, make_group, tmp_path):
    mesh = await start_mesh([engine], env=[zoo("leaves")], workers=1)
    await mesh.collect(make_group(environment="leaves", deadline_s=PATIENCE_S))
    logs = (tmp_path / "logs" / "envs").rglob("env_worker_*.log")
    left = [int(pid) for log in logs for pid in re.findall(r"left process (\d+)", log.read_text())]
    assert left
    await until(lambda: not any(map(runs, left)), PATIENCE_S)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def worker_pids() -> list[int]:
    """Processes that the fork server of this test process has started, the oldest first."""
    from multiprocessing.forkserver import _forkserver

    if _forkserver._forkserver_pid is None:
        return []
    with open(f"/proc/{_forkserver._forkserver_pid}/task/{_forkserver._forkserver_pid}/children") as children:
        return [int(pid) for pid in children.read().split()]


@pytest.mark.usefixtures("no_grace")
async def test_a_rollout_that_others_block_one_after_the_other_is_played_again_until_it_ends(
    start_mesh, engine, make_group, tokens, said
):
    kinds, blocked = [f"blocks {number}" for number in range(1, 4)], []
    gate = Gate(engine, tokens)
    bad = [zoo("blocks", deadlines={"blocked_s": 3600.0}) | {"name": kind} for kind in kinds]
    mesh = await start_mesh([engine], env=[{"id": "mesh_echo"}, *bad], workers=1, blocked_s=3600.0)
    healthy = asyncio.create_task(mesh.collect(make_group(group_size=2, deadline_s=PATIENCE_S)))
    for number, kind in enumerate(kinds, start=2):
        await gate.held.get()
        await gate.held.get()  # both are played, once more after each worker that stands still
        await said.until(f"worker {number} has loaded {', '.join(['mesh_echo', *kinds[number - 2 :]])}")
        blocked.append(asyncio.create_task(mesh.collect(make_group(environment=kind, deadline_s=PATIENCE_S))))
    await gate.held.get()
    await gate.held.get()
    gate.opened.set()
    *rollouts, summary = await healthy
    assert (summary.finished, summary.failed) == (2, 0), rollouts
    assert mesh.runner.status().failures == {}
    for blocking in blocked:
        blocking.cancel()
    await asyncio.wait(blocked)


@pytest.mark.usefixtures("no_grace")
async def test_rollouts_of_the_same_environment_beside_the_one_that_loses_the_worker_are_played_again(
    start_mesh, engine, make_group
):
    kinds, released, held = ("dies", "blocks"), asyncio.Event(), asyncio.Queue()

    async def hold_the_good(request, body):
        if body["sampling_params"]["seed"] >= 100:
            held.put_nowait(None)
            await released.wait()

    engine.on_call = hold_the_good
    env = [zoo(kind, workers=1, deadlines={"blocked_s": 1.0}) for kind in kinds]
    for mixed in env:
        mixed["args"]["every"] = 2
    mesh = await start_mesh([engine], env=env)

    def play(kind, **fields):
        return asyncio.create_task(mesh.collect(make_group(environment=kind, deadline_s=PATIENCE_S, **fields)))

    beside = [play(kind, task_index=1, group_size=3, sampling=Sampling(seed=100)) for kind in kinds]
    for _ in range(6):
        await held.get()
    bad = [play(kind, task_index=0, sampling=Sampling(seed=1)) for kind in kinds]
    for number, losing in enumerate(bad, start=1):
        failure, _ = await losing
        assert (failure.reason, f"worker {number}" in failure.message) == ("ENVIRONMENT_FAILED", True)
    released.set()
    for good in beside:
        *rollouts, summary = await good
        assert (summary.finished, summary.failed) == (3, 0), rollouts
    assert mesh.runner.status().failures == {"ENVIRONMENT_FAILED": 2}


async def test_time_in_which_another_environment_blocks_the_worker_counts_for_no_deadline_of_its_neighbours(
    start_mesh, engine, make_group, tokens
):
    gate = Gate(engine, tokens)
    blocks = zoo("blocks")
    blocks["args"]["seconds"] = 4.0
    env = [{"id": "mesh_echo", "deadlines": {"turn_s": 3.0, "rollout_s": 3.0}}, blocks]
    mesh = await start_mesh([engine], env=env, workers=1, standby=False, blocked_s=3600.0)
    healthy = asyncio.create_task(mesh.collect(make_group(group_size=2, deadline_s=PATIENCE_S)))
    await gate.held.get()
    await gate.held.get()
    blocking = await mesh.collect(make_group(environment="blocks", deadline_s=PATIENCE_S))
    gate.opened.set()
    assert blocking[-1].finished == 1
    *rollouts, summary = await healthy
    assert (summary.finished, summary.failed) == (2, 0), rollouts


async def test_a_group_that_a_worker_refuses_counts_no_failure_and_one_that_is_late_before_a_worker_opens_it_does(
    start_mesh, engine, make_group
):
    mesh = await start_mesh([engine], workers=1)
    broken = make_group(task_payload='{"prompt": 7}', group_size=3, deadline_s=PATIENCE_S)
    with pytest.raises(MeshError) as refusal:
        await mesh.collect(broken)
    assert refusal.value.reason is Reason.INVALID_REQUEST
    assert refusal.value.violations[0].field.startswith("task_payload.")
    status = mesh.runner.status()
    assert (status.running, status.queued, dict(status.failures)) == (0, 0, {})
    assert isinstance((await mesh.collect(make_group(deadline_s=PATIENCE_S)))[0], Rollout)
    *failures, summary = await mesh.collect(make_group(group_size=2, deadline_s=1e-6))
    assert summary == RolloutSummary(finished=0, failed=2, cancelled=0, sampled_tokens=0)
    assert {failure.reason for failure in failures} == {"DEADLINE_PASSED"}
    assert all("not finished within deadline_s = 1e-06: " in failure.message for failure in failures)
    assert len({failure.rollout_id for failure in failures}) == 2
    status = mesh.runner.status()
    assert (status.running, status.queued, dict(status.failures)) == (0, 0, {"DEADLINE_PASSED": 2})


@pytest.mark.usefixtures("no_grace")
async def test_a_group_ends_at_its_deadline_with_what_it_did_also_where_its_worker_is_blocked(
    start_mesh, engine, make_group
):
    stages = {
        "hangs": r"it was in its rewards and metrics, [\d.]+ s into this stage",
        "blocks": r"it was being played \(worker 2, held up by blocks in go_wrong \(mesh_zoo.py:\d+\)\), [\d.]+ s .*",
    }
    env = [zoo(kind, workers=1, deadlines={"blocked_s": 3600.0}) for kind in stages]
    mesh = await start_mesh([engine], env=env)
    asked = [make_group(environment=kind, group_size=2, deadline_s=8.0) for kind in stages]
    async with asyncio.timeout(PATIENCE_S):
        groups = await asyncio.gather(*map(mesh.collect, asked))
    for (*failures, summary), doing in zip(groups, stages.values(), strict=True):
        assert (summary.failed, {failure.reason for failure in failures}) == (2, {"DEADLINE_PASSED"})
        words = [failure.message.partition(": ") for failure in failures]
        assert {first for first, _, _ in words} == {"not finished within deadline_s = 8"}
        assert any(re.fullmatch(doing, rest) for _, _, rest in words), words
