"""Orchestrators that are killed anywhere and trainers that come back at an earlier step: every rollout counts once."""

import asyncio
import json
import queue
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.ledger.writer import LedgerWriter
from meshrl.orchestrator.run import Run
from meshrl.orchestrator.work.plan import TaskSchedule, TrainSource
from meshrl.sampling.retry import RunError
from polling import until
from run_output import assert_exact, query, records, step_records


class LosesTheRest(LedgerWriter):
    """What is not committed when its process is killed is lost."""

    killed = False

    def put(self, change) -> None:
        if not self.killed:
            super().put(change)

    def close(self, deadline_s: float) -> None:
        while self.killed and not self._queue.empty():
            with suppress(queue.Empty):  # its own thread may have been quicker
                self._queue.get_nowait()
        super().close(deadline_s)


@pytest.fixture
def live(start, tmp_path) -> Callable[..., Awaitable[bool]]:
    """One process, killed once `kill_when` returns or awaits true; True when the run came to its end."""

    async def live(config: OrchestratorConfig, kill_when: Callable[[], object] = lambda: False) -> bool:
        writer = LosesTheRest(tmp_path / "ledger.sqlite", flush_interval_s=0.02)
        async with start(config, writer) as (loop, journal):
            running = asyncio.create_task(loop.train())
            try:
                await until(lambda: running.done() or kill_when(), 180.0)
                if running.done():
                    running.result()
                    journal.end()
                else:
                    writer.killed = True
                return running.done()
            finally:
                running.cancel()
                await asyncio.wait({running}, timeout=60.0)

    return live


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", [0, 2])
async def test_an_orchestrator_killed_anywhere_goes_on_and_counts_once(
    live, mesh, script, make_config, tmp_path, seed, level
) -> None:
    chance = random.Random(seed)
    script.reward = lambda request, place: float(place % 2) if request.task_index % 4 else 1.0
    script.fails = lambda request, place: request.task_index % 5 == 1 and place == 0
    config = make_config(mesh.services, max_steps=8, max_async_level=level)
    script.step_s = 0.04

    def soon() -> Awaitable[bool]:
        return asyncio.sleep(chance.uniform(0.01, 0.12), result=True)

    lives = 1
    while not await (live(config, soon) if lives < 8 else live(config)):
        lives += 1
    assert lives > 2
    assert_exact(tmp_path, 8)
    trained = [one for step in range(1, 9) for one in script.batches[step]]
    assert len(set(trained)) == len(trained)
    assert [line["step"] for line in step_records(tmp_path)] == list(range(1, 9))
    assert sorted(script.trained) == [(1, step) for step in range(1, 9)]
    totals = [line["progress/samples"] for line in step_records(tmp_path)]
    assert totals == [sum(len(script.batches[one]) for one in range(1, step + 1)) for step in range(1, 9)]
    drawn = query(tmp_path, "SELECT DISTINCT sequence, environment, task_index FROM groups ORDER BY sequence")
    schedule = TaskSchedule([TrainSource(environment="echo", ratio=1.0, num_tasks=50)], seed=0)
    in_order = [schedule.next_task() for _ in drawn]
    assert drawn == [(place, task.environment, task.index) for place, task in enumerate(in_order)]
    again = query(tmp_path, "SELECT COUNT(*) - COUNT(DISTINCT sequence) FROM groups")[0][0]
    assert query(tmp_path, "SELECT COUNT(*), COUNT(DISTINCT replaces) FROM groups WHERE replaces != ''") == [
        (again, again)
    ]
    whole = query(
        tmp_path,
        "SELECT COUNT(*), task_index % 5 = 1 FROM rollouts JOIN groups USING (group_id, task_index)"
        " WHERE state IN ('trained', 'dropped') AND reason != 'run_ended' GROUP BY sequence",
    )
    assert {(size, bool(one_fails)) for size, one_fails in whole} <= {(4, False), (3, True)}
    assert query(tmp_path, "SELECT COUNT(*) FROM payloads") == [(0,)]


@pytest.mark.parametrize("level", [0, 2])
async def test_a_trainer_that_comes_back_earlier_trains_the_same_batches_again(
    live, mesh, script, make_config, tmp_path, level
) -> None:
    script.durable_every = 3
    config = make_config(
        mesh.services,
        max_steps=10,
        max_async_level=level,
        checkpoint_interval=3,
        deadlines={"unreachable_s": 60.0},
    )
    script.step_holds = {6: asyncio.Event(), 8: asyncio.Event()}  # neither life reaches its next checkpoint
    (tmp_path / "metrics.jsonl").touch()
    running = asyncio.create_task(live(config))
    await until(lambda: running.done() or 5 in [line["step"] for line in step_records(tmp_path)])
    await mesh.kill_trainer()
    script.step_holds[6].set()
    await mesh.start_trainer(3)
    await until(lambda: (2, 7) in script.trained or running.done())
    await mesh.kill_trainer()
    script.step_holds[8].set()
    await mesh.start_trainer(6)
    assert await running
    assert_exact(tmp_path, 10)
    assert [step for epoch, step in script.trained if epoch == 2][:2] == [4, 5]
    assert [step for epoch, step in sorted(script.trained) if epoch == 3] == [7, 8, 9, 10]
    for step in range(1, 11):
        assert len({digest for (_, known), digest in script.trained.items() if known == step}) == 1
    lines = step_records(tmp_path)
    first = [line["step"] for line in lines if "progress/redone" not in line]
    assert first == list(range(1, 11))
    assert {4, 5} <= {line["step"] for line in lines if "progress/redone" in line}
    assert lines[-1]["progress/samples"] == 80
    assert script.engine_version == 10
    assert query(tmp_path, "SELECT state, COUNT(*) FROM rollouts WHERE state = 'trained'") == [("trained", 80)]
    state = json.loads((tmp_path / "checkpoints/step_3/orchestrator/progress.json").read_text())
    assert (state["step"], state["samples"], state["problems"]) == (3, 24, 6)
    assert (tmp_path / "checkpoints/step_10/orchestrator/progress.json").exists()


async def test_a_batch_that_is_done_while_it_is_read_for_its_upload_is_not_missed(
    live, mesh, script, make_config, tmp_path, monkeypatch
) -> None:
    script.step_holds[1] = asyncio.Event()  # so that the second process finds it undone, however slow it is to start
    config = make_config(mesh.services, max_steps=4)

    assert not await live(config, lambda: len(script.uploads) == 2)
    read, late = Run.batch, []

    async def read_late(run: Run, step: int):
        if step not in run._submitted:
            late.append(step)
            script.step_holds[1].set()
            await until(lambda: run.journal._forgotten >= step)
            await until(lambda: not query(tmp_path, "SELECT 1 FROM parts WHERE step = ?", step))
        return await read(run, step)

    monkeypatch.setattr(Run, "batch", read_late)
    assert await live(config)
    assert late
    assert_exact(tmp_path, 4)


async def test_both_may_die(live, mesh, script, make_config, tmp_path) -> None:
    script.durable_every = 2
    script.step_holds[6] = asyncio.Event()  # else the orchestrator might live to see the next checkpoint
    config = make_config(mesh.services, max_steps=8, checkpoint_interval=2)

    assert not await live(config, lambda: (1, 5) in script.trained)
    await mesh.kill_trainer()
    script.step_holds[6].set()
    await mesh.start_trainer(4)
    assert await live(config)
    assert_exact(tmp_path, 8)
    assert script.trained[(1, 5)] == script.trained[(2, 5)]


async def test_versions_that_a_restarted_trainer_is_ahead_of_are_skipped(
    live, mesh, script, make_config, tmp_path
) -> None:
    """It would take far longer than the test has to wait for a trainer that makes them again: it never does."""
    script.durable_every = 1
    script.holds[3] = asyncio.Event()
    config = make_config(
        mesh.services,
        max_steps=8,
        checkpoint_interval=1,
        deadlines={"unreachable_s": 600.0, "activation_s": 600.0},
    )
    running = asyncio.create_task(live(config))
    await until(lambda: ((1, 5) in script.trained and ("active", 2) in script.log) or running.done())
    await mesh.kill_trainer()
    script.gone_versions = {1, 2, 3, 4}
    await mesh.start_trainer(5)
    script.holds[3].set()
    assert await asyncio.wait_for(running, 60.0)
    assert_exact(tmp_path, 8)
    lines = {line["step"]: line for line in step_records(tmp_path)}
    assert [step for step, line in lines.items() if line.get("weights/skipped")] == [3, 4]
    assert [step for step, line in lines.items() if line["weights/activated"]] == [1, 2, 5, 6, 7, 8]
    assert [version for what, version in script.log if what == "active"] == [0, 1, 2, 5, 6, 7, 8]


async def test_the_version_that_a_trainer_comes_back_at_is_waited_for(
    live, mesh, script, make_config, tmp_path
) -> None:
    """A trainer answers before it has published that version anew."""
    script.durable_every = 1
    script.holds[3], script.step_holds[4] = asyncio.Event(), asyncio.Event()
    config = make_config(
        mesh.services,
        max_steps=6,
        checkpoint_interval=1,
        deadlines={"unreachable_s": 600.0, "activation_s": 600.0},
    )
    running = asyncio.create_task(live(config))
    await until(lambda: ((1, 3) in script.trained and ("active", 2) in script.log) or running.done())
    await mesh.kill_trainer()
    script.gone_versions = {1, 2, 3}
    await mesh.start_trainer(3)
    script.holds[3].set()
    await until(lambda: script.log.count(("unknown", 3)) > 1 or running.done())
    script.gone_versions = {1, 2}
    script.step_holds[4].set()
    assert await asyncio.wait_for(running, 60.0)
    assert_exact(tmp_path, 6)
    assert [line["step"] for line in step_records(tmp_path) if line["weights/activated"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("level", [0, 1])
async def test_an_evaluation_that_the_orchestrator_died_in_is_made_anew(
    live, mesh, script, make_config, tmp_path, level
) -> None:
    script.environments = {"echo": 50, "held-out": 3, "seldom": 2}
    script.delay = lambda request: 3600.0 if request.environment == "held-out" and len(script.trained) >= 2 else 0.0
    script.step_holds[3] = asyncio.Event()
    evals = {"interval": 2, "env": [{"id": "held-out"}, {"id": "seldom", "interval": 3}], "group_size": 2}
    config = make_config(mesh.services, max_async_level=level, max_steps=5, eval=evals)

    def second_step_is_evaluated() -> bool:
        evaluated = sum(one.environment == "held-out" for one in script.requests)
        return evaluated > 3 and [line["step"] for line in step_records(tmp_path)] == [1, 2]

    assert not await live(config, second_step_is_evaluated)
    script.delay = lambda request: 0.0

    def scored(name: str) -> list[int]:
        return [line["step"] for line in records(tmp_path) if f"eval/{name}/avg@2" in line]

    running = asyncio.create_task(live(config))
    await until(lambda: scored("held-out") == [0, 2] or running.done())
    script.step_holds[3].set()  # no sooner: what a later step owes is evaluated together with it
    assert await asyncio.wait_for(running, 60.0)
    assert_exact(tmp_path, 5)
    assert (scored("held-out"), scored("seldom")) == ([0, 2, 4, 5], [0, 3, 5])


async def test_a_new_run_resumes_from_an_earlier_checkpoint(live, mesh, script, make_config, tmp_path) -> None:
    script.durable_every = 2
    config = make_config(mesh.services, max_steps=5, checkpoint_interval=2)
    assert await live(config)
    before = dict(script.trained)
    await mesh.kill_trainer()
    await mesh.start_trainer(4)
    assert await live(make_config(mesh.services, max_steps=7, checkpoint_interval=2))
    assert_exact(tmp_path, 7)
    assert script.trained[(2, 5)] == before[(1, 5)]
    assert [line["step"] for line in step_records(tmp_path)] == [1, 2, 3, 4, 5, 5, 6, 7]
    assert step_records(tmp_path)[-1]["progress/samples"] == 56


async def test_without_an_interval_the_part_of_the_last_step_is_written(live, mesh, make_config, tmp_path) -> None:
    assert await live(make_config(mesh.services, max_steps=3, checkpoint_at_end=True))
    (state,) = (tmp_path / "checkpoints").rglob("progress.json")
    assert state == tmp_path / "checkpoints/step_3/orchestrator/progress.json"
    assert json.loads(state.read_text())["samples"] == 24


async def test_a_resumed_trainer_of_another_size_trains_the_same_rollouts_in_new_batches(
    live, mesh, script, make_config, tmp_path
) -> None:
    script.durable_every = 2
    config = make_config(mesh.services, max_steps=5, checkpoint_interval=2)
    assert await live(config)
    query(tmp_path, "UPDATE steps SET record = json_set(record, '$.dp_size', 2)")
    fifth = set(script.batches[5])
    await mesh.kill_trainer()
    await mesh.start_trainer(4)
    assert await live(make_config(mesh.services, max_steps=6, checkpoint_interval=2))
    assert_exact(tmp_path, 6)
    assert set(script.batches[5]) == fifth


async def test_a_fresh_start_in_a_used_folder_begins_a_run_of_its_own(
    live, mesh, script, make_config, tmp_path
) -> None:
    script.step_holds[3] = asyncio.Event()  # the first run does not come to its end
    config = make_config(mesh.services, max_steps=3)

    assert not await live(config, lambda: (1, 2) in script.trained)
    await mesh.kill_trainer()
    script.step_holds[3].set()
    await mesh.start_trainer(0)
    assert await live(config)
    assert_exact(tmp_path, 3)
    assert [run for (run,) in query(tmp_path, "SELECT DISTINCT run FROM rollouts ORDER BY 1")] == [1, 2]
    assert query(tmp_path, "SELECT COUNT(*) FROM rollouts WHERE run = 1 AND reason = 'superseded'")[0][0] > 0
    assert step_records(tmp_path)[-1]["progress/samples"] == 24


async def test_a_launch_goes_on_even_before_the_first_checkpoint(live, mesh, script, make_config, tmp_path) -> None:
    config = make_config(mesh.services, max_steps=4, checkpoint_interval=100, session="s1")

    assert not await live(config, lambda: (1, 2) in script.trained)
    await mesh.kill_trainer()
    await mesh.start_trainer(0)
    assert await live(config)
    assert_exact(tmp_path, 4)
    assert script.trained[(1, 1)] == script.trained[(2, 1)]
    assert query(tmp_path, "SELECT DISTINCT run FROM rollouts") == [(1,)]


async def test_a_trainer_without_checkpoints_that_restarts_ends_the_run(live, mesh, script, make_config) -> None:
    config = make_config(mesh.services, max_steps=None, deadlines={"unreachable_s": 5.0})
    running = asyncio.create_task(live(config))
    await until(lambda: (1, 4) in script.trained)
    await mesh.kill_trainer()
    await mesh.start_trainer(0)
    with pytest.raises(RunError, match=r"restarted at step 0, but the batch of step 1 is no longer kept.*ckpt.interv"):
        await running


async def test_a_trainer_that_stays_away_ends_the_run_only_after_its_time(live, mesh, script, make_config) -> None:
    config = make_config(mesh.services, max_steps=None, deadlines={"unreachable_s": 2.0})
    running = asyncio.create_task(live(config))
    await until(lambda: (1, 2) in script.trained)
    killed_s = time.monotonic()
    await mesh.kill_trainer()
    with pytest.raises(RunError, match=f"trainer at {mesh.services.trainer}"):
        await asyncio.wait_for(running, 60.0)
    assert time.monotonic() - killed_s > 0.5, "the last sign of life may be older than the kill"
