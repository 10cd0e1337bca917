import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from meshrl.cli.run_folder import RunFolder
from meshrl.cli.status import read_status
from meshrl.core.config import dump_toml
from meshrl.orchestrator.config import DeadlinesConfig
from meshrl.orchestrator.work.plan import TaskSchedule, TrainSource
from meshrl.sampling import pool
from meshrl.sampling.retry import RunError
from meshrl.wire.errors import Reason
from meshrl.wire.types import Rollout, RolloutRequest, Suspension
from polling import until
from run_output import assert_exact, records


def staleness(script) -> list[int]:
    return [
        step - 1 - script.rollout_versions[rollout] for step, rollouts in script.batches.items() for rollout in rollouts
    ]


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_every_level_trains_all_steps_within_the_law(mesh, script, make_config, start, tmp_path, level) -> None:
    config = make_config(mesh.services, max_async_level=level, max_steps=6)
    async with start(config) as (loop, journal):
        await loop.train()
    assert sorted(script.batches) == [1, 2, 3, 4, 5, 6]
    assert all(len(set(rollouts)) == 8 for rollouts in script.batches.values())
    assert script.engine_version == 6
    assert 0 <= max(staleness(script)) <= level
    written = records(tmp_path)
    assert [line["step"] for line in written] == [1, 2, 3, 4, 5, 6]
    assert all(line["off_policy/all/max"] <= level for line in written)
    balance = journal.ledger.balance()
    assert (balance.dispatched, balance.trained, balance.open) == (48, 48, 0)


async def test_level_zero_generates_nothing_before_the_version_is_active(mesh, script, make_config, start) -> None:
    async with start(make_config(mesh.services, max_async_level=0)) as (loop, _):
        await loop.train()
    assert set(staleness(script)) == {0}
    kinds = [kind for kind, _ in script.log]
    one_step = ["generate", "generate", "batch", "trained", "active"]
    assert kinds == ["active", *one_step * 4]
    assert [request.min_version for request in script.requests] == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_level_one_generates_while_the_trainer_trains(mesh, script, make_config, start) -> None:
    script.step_holds[1] = asyncio.Event()
    async with start(make_config(mesh.services, max_async_level=1)) as (loop, _):
        running = asyncio.create_task(loop.train())
        await until(lambda: ("batch", 2) in script.log or running.done())
        script.step_holds[1].set()
        await running
    before_first_version = script.log[: script.log.index(("trained", 1))]
    assert Counter(kind for kind, _ in before_first_version) == {"active": 1, "generate": 4, "batch": 2}


async def test_refused_groups_are_asked_for_again_under_a_new_request_id(mesh, script, make_config, start) -> None:
    script.refusals = [Reason.OVERLOADED, Reason.DRAINING, Reason.VERSION_NOT_AVAILABLE, Reason.OVERLOADED]
    async with start(make_config(mesh.services, max_steps=2)) as (loop, journal):
        await loop.train()
    assert script.refused == {"OVERLOADED": 2, "DRAINING": 1, "VERSION_NOT_AVAILABLE": 1}
    assert len({request.request_id for request in script.requests}) == len(script.requests)
    assert journal.ledger.balance().trained == 16


async def test_why_groups_are_refused_for_long_is_logged_once(mesh, script, make_config, start, monkeypatch, warned):
    monkeypatch.setattr(pool, "NAMED_AFTER_S", 0.0)
    script.refusals = [Reason.VERSION_NOT_AVAILABLE] * 6
    async with start(make_config(mesh.services, max_steps=1)) as (loop, _):
        await loop.train()
    assert [line.partition(" takes no groups: ")[2] for line in warned if "takes no groups" in line] == [
        "VERSION_NOT_AVAILABLE: scripted"
    ]


async def test_zero_signal_groups_are_counted_and_replaced(mesh, script, make_config, start, tmp_path) -> None:
    script.reward = lambda request, place: float(place % 2) if request.task_index % 2 else 1.0
    async with start(make_config(mesh.services, max_async_level=1, max_steps=3)) as (loop, journal):
        await loop.train()
    assert all(len(rollouts) == 8 for rollouts in script.batches.values())
    balance = journal.ledger.balance()
    assert balance.exact
    assert balance.trained == 24
    assert balance.dropped["zero_signal"] > 0
    written = records(tmp_path)
    assert max(line["filters/zero_signal"] for line in written) > 0
    assert sum(line["dropped/zero_signal"] for line in written) <= balance.dropped["zero_signal"]


@pytest.mark.parametrize(
    ("section", "advice"),
    [("", r"set --no-filters\.zero-signal$"), ("orchestrator", r"set --no-orchestrator\.filters\.zero-signal$")],
)
async def test_tasks_without_signal_end_the_run_with_the_flag_to_set(
    mesh, script, make_config, start, monkeypatch, section, advice
) -> None:
    monkeypatch.setenv("MESHRL_SECTION", section)
    script.reward = lambda request, place: 1.0
    async with start(make_config(mesh.services, filters={"max_zero_signal_groups": 3})) as (loop, _):
        with pytest.raises(RunError, match=advice):
            await loop.train()


async def test_a_group_survives_losses_and_errors_are_counted(mesh, script, make_config, start, tmp_path) -> None:
    script.fails = lambda request, place: place == 3
    async with start(make_config(mesh.services, max_steps=2)) as (loop, journal):
        await loop.train()
    assert all(len(rollouts) == 6 for rollouts in script.batches.values())
    assert [line["errored_rollouts/all"] for line in records(tmp_path)] == [0.25, 0.25]
    assert journal.ledger.balance().failed == {"ENVIRONMENT_FAILED": 4}
    assert journal.ledger.balance().exact


async def test_lost_groups_are_replaced_until_there_are_too_many(mesh, script, make_config, start) -> None:
    script.fails = lambda request, place: True
    async with start(make_config(mesh.services, filters={"max_lost_groups": 4})) as (loop, _):
        with pytest.raises(
            RunError, match=r"4 groups in a row were lost to failures.*ENVIRONMENT_FAILED: scripted crash"
        ):
            await loop.train()


async def test_groups_lost_to_an_engine_that_restarts_do_not_end_the_run(
    mesh, script, make_config, start, monkeypatch
) -> None:
    """It may be away for unreachable_s, as a service may; groups that only wait for it are lost much faster."""
    monkeypatch.setattr("meshrl.orchestrator.dispatch.WAIT_S", (0.02, 0.05))
    script.fails = lambda request, place: request in script.requests[:12]
    script.failure_reason = "ENGINE_FAILED"
    patient = {"unreachable_s": 60.0}
    config = make_config(mesh.services, filters={"max_lost_groups": 4}, deadlines=patient, max_steps=2)
    async with start(config) as (loop, journal):
        await asyncio.wait_for(loop.train(), 60.0)
    assert journal.ledger.balance().failed == {"ENGINE_FAILED": 48}
    assert journal.ledger.balance().trained == 16


async def test_a_version_that_cannot_be_activated_is_skipped_where_the_law_allows(
    mesh, script, make_config, start, tmp_path
) -> None:
    script.broken_versions = {2}
    async with start(make_config(mesh.services, max_async_level=2, max_steps=5)) as (loop, _):
        await loop.train()
    assert [version for kind, version in script.log if kind == "active"] == [0, 1, 3, 4, 5]
    assert [line["weights/activated"] for line in records(tmp_path)] == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert max(staleness(script)) <= 3


async def test_a_synchronous_run_ends_when_its_version_cannot_be_activated(mesh, script, make_config, start) -> None:
    script.broken_versions = {2}
    async with start(make_config(mesh.services, max_async_level=0)) as (loop, _):
        with pytest.raises(
            RunError, match=r"step 3 needs version 2 on the engines \(max_async_level = 0\), but they serve"
        ):
            await loop.train()


async def test_a_failed_step_ends_the_run_with_its_reason(mesh, script, make_config, start, monkeypatch) -> None:
    monkeypatch.setattr("meshrl.orchestrator.peers.step_watcher.CRASH_S", 0.1)
    script.failing_steps = {2}
    async with start(make_config(mesh.services)) as (loop, _):
        with pytest.raises(
            RunError, match=f"trainer at {mesh.services.trainer} failed step 2: STEP_FAILED: loss is NaN"
        ):
            await loop.train()


async def test_stale_rollouts_are_dropped_and_replaced(mesh, script, make_config, start) -> None:
    script.step_holds[1] = asyncio.Event()  # until groups of the steps behind it have come back
    config = make_config(mesh.services, max_async_level=2, max_off_policy_steps=0, max_steps=4)
    async with start(config) as (loop, journal):
        training = asyncio.create_task(loop.train())
        await until(lambda: "stale" in journal.ledger.balance().dropped or training.done())
        script.step_holds[1].set()
        await training
    assert set(staleness(script)) == {0}
    assert journal.ledger.balance().dropped["stale"] > 0
    assert journal.ledger.balance().exact


@pytest.mark.parametrize(
    ("service", "name"), [("rollout", "rollout service"), ("trainer", "trainer"), ("weights", "weight hub")]
)
async def test_a_dead_service_is_named_within_seconds(mesh, script, make_config, start, service, name) -> None:
    script.step_s = 0.05
    async with start(make_config(mesh.services, max_steps=None)) as (loop, _):
        running = asyncio.create_task(loop.train())
        await until(lambda: len(script.batches) >= 2)
        await mesh.servers[service].drain(grace_s=0.0)
        address = mesh.services.rollout[0] if service == "rollout" else getattr(mesh.services, service)
        with pytest.raises(RunError, match=f"{name} at {address}"):
            await asyncio.wait_for(running, 60.0)


async def test_stopping_cancels_what_is_in_flight(mesh, script, make_config, start) -> None:
    script.rollout_s = 600.0
    async with start(make_config(mesh.services)) as (loop, journal):
        running = asyncio.create_task(loop.train())
        await until(lambda: script.in_flight >= 6)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await until(lambda: not script.in_flight)
    assert script.cancelled == 6
    journal.end()
    assert journal.ledger.balance().cancelled == 24


@pytest.mark.parametrize("level", [0, 1])
async def test_evaluations_run_before_between_and_after(mesh, script, make_config, start, tmp_path, level) -> None:
    script.environments = {"echo": 50, "held-out": 3}
    script.reward = lambda request, place: float(place % 2) if request.environment == "echo" else 0.25
    evals = {"interval": 2, "env": [{"id": "held-out"}], "group_size": 2, "pass_threshold": 0.2}
    config = make_config(mesh.services, max_async_level=level, max_steps=3, eval=evals)
    async with start(config) as (loop, _):
        await loop.train()
    scores = {line["step"]: line for line in records(tmp_path) if "eval/held-out/avg@2" in line}
    assert sorted(scores) == [0, 2, 3]
    assert scores[0]["eval/held-out/avg@2"] == 0.25
    assert {(request.environment == "held-out", request.scores_only) for request in script.requests} == {
        (True, True),
        (False, False),
    }
    assert scores[0]["eval/held-out/pass@2"] == 1.0
    assert scores[0]["eval/held-out/version/max"] == 0
    assert scores[3]["eval/held-out/version/min"] == 3
    assert {request.task_index for request in script.requests if request.environment == "held-out"} == {0, 1, 2}
    if level == 0:
        assert scores[2]["eval/held-out/version/max"] == 2


async def test_only_evaluations_sample_with_seeds_where_nobody_asked_for_them(mesh, script, make_config, start) -> None:
    script.environments = {"echo": 50, "held-out": 3}
    evals = {"interval": 100, "env": [{"id": "held-out"}], "group_size": 2}
    async with start(make_config(mesh.services, max_async_level=0, max_steps=2, eval=evals)) as (loop, _):
        await loop.train()
    seeds = {
        name: [one.sampling.seed for one in script.requests if one.environment == name] for name in ("echo", "held-out")
    }
    assert seeds["echo"] == [None] * 4
    assert sorted(seeds["held-out"][:3]) == [0, 2, 4] == sorted(seeds["held-out"][3:])


async def test_the_same_seed_asks_for_the_same_tasks_with_the_same_seeds(mesh, script, make_config, start) -> None:
    async with start(make_config(mesh.services, max_async_level=0, max_steps=2, seed=3)) as (loop, _):
        await loop.train()
    asked = [(one.task_index, one.sampling.seed) for one in script.requests]
    assert sorted(seed for _, seed in asked) == [(3 << 32) + 4 * number for number in range(4)]
    schedule = TaskSchedule([TrainSource(environment="echo", ratio=1.0, num_tasks=50)], seed=3)
    assert {task for task, _ in asked} == {schedule.next_task().index for _ in range(4)}


def long_in_essays(request: RolloutRequest, place: int, rollout: Rollout) -> Rollout:
    if request.environment != "essay":
        return rollout
    (sample,) = rollout.samples
    length = 40
    mask = np.arange(length) >= 2
    longer = replace(
        sample,
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        version_spans=(replace(sample.version_spans[0], end=length),),
    )
    return replace(rollout, samples=(longer,))


@pytest.mark.parametrize(("seed", "first"), [(None, "essay"), (1, "echo")])
async def test_groups_that_were_long_begin_first_within_their_step_unless_the_run_has_a_seed(
    mesh, script, make_config, start, monkeypatch: pytest.MonkeyPatch, seed: int | None, first: str
) -> None:
    script.environments = {"echo": 50, "essay": 50}
    script.alter = long_in_essays
    begun: list[str] = []
    config = make_config(
        mesh.services, train={"env": [{"id": "echo"}, {"id": "essay"}]}, max_async_level=0, max_steps=4, seed=seed
    )
    async with start(config) as (loop, journal):
        sampler = loop._dispatcher._sampler
        sample = sampler.sample
        monkeypatch.setattr(
            sampler, "sample", lambda ticket, **more: (begun.append(ticket.group_id), sample(ticket, **more))[1]
        )
        await loop.train()
    environment_of = {request.group_id: request.environment for request in script.requests}
    order = [environment_of[group] for group in begun]  # requests that are sent at once arrive in either order
    assert order[:2] == ["echo", "essay"]  # as they were drawn: nothing is known of lengths yet
    assert order[2::2] == [first] * 3
    assert Counter(order) == {"echo": 4, "essay": 4}
    assert journal.ledger.balance().trained == 32


@pytest.mark.parametrize("slots", [16, None])
async def test_records_say_what_of_the_slots_was_idle_where_the_service_says_how_many(
    mesh, script, make_config, start, tmp_path, slots: int | None
) -> None:
    script.slots = slots
    script.holds[1] = asyncio.Event()  # the first batch is held until the service has answered
    async with start(make_config(mesh.services, max_async_level=0, max_steps=3)) as (loop, _):
        training = asyncio.create_task(loop.train())
        await until(lambda: script.asked_for_status > (slots is not None))
        script.holds[1].set()
        await training
    shares = [(line.get("perf/idle_slots"), line.get("perf/tail_idle_slots")) for line in records(tmp_path)][1:]
    if slots is None:
        assert shares == [(None, None)] * 2
    else:
        assert all(0.5 <= idle <= 1.0 for idle, _ in shares), "8 rollouts a step never fill 16 slots"
        assert all(0.0 < tail <= idle for idle, tail in shares)


async def test_each_evaluation_environment_has_its_own_interval_tasks_and_group_size(
    mesh, script, make_config, start, tmp_path
) -> None:
    script.environments = {"echo": 50, "often": 9, "rarely": 9}
    own = {"id": "often", "interval": 1, "num_examples": 2, "rollouts_per_example": 3, "sampling": {"max_tokens": 7}}
    evals = {"interval": 2, "num_examples": 4, "eval_final": False, "env": [own, {"id": "rarely"}]}
    config = make_config(mesh.services, max_async_level=0, max_steps=3, eval=evals)
    async with start(config) as (loop, _):
        await loop.train()
    written = [line for line in records(tmp_path) if "eval/version" in line]
    found = [
        (line["step"], line.get("eval/often/asked"), line.get("eval/rarely/asked"), "eval/often/avg@3" in line)
        for line in written
    ]
    assert found == [(0, 6, 4, True), (1, 6, None, True), (2, 6, 4, True), (3, 6, None, True)]
    assert {(r.group_size, r.sampling.max_tokens) for r in script.requests if r.environment == "often"} == {(3, 7)}


async def test_group_sizes_of_environments_reach_their_requests_and_the_batch(
    mesh, script, make_config, start, tmp_path
) -> None:
    script.environments = {"pairs": 50, "fours": 50}
    train = {"env": [{"id": "pairs", "group_size": 2, "ratio": 2.0}, {"id": "fours"}]}
    async with start(make_config(mesh.services, train=train, max_async_level=1)) as (loop, journal):
        await loop.train()
        journal.end()
    assert {(r.environment, r.group_size) for r in script.requests} == {("pairs", 2), ("fours", 4)}
    assert {len(rollouts) for rollouts in script.batches.values()} <= {8, 10}
    written = records(tmp_path)
    assert written[0]["mixture/pairs/ratio"] == 0.5
    trained = [(line["mixture/pairs/rollouts"], line["batch/rollouts"]) for line in written]
    assert sum(share * size for share, size in trained) / sum(size for _, size in trained) == pytest.approx(
        0.5, abs=0.1
    )
    assert_exact(tmp_path, 4)


async def test_a_config_that_does_not_fit_the_services_is_refused_before_a_run_is_made(
    mesh, make_config, start
) -> None:
    new = {"run_id": "another", "run": {"share": 1.0}}
    with pytest.raises(RunError, match=r"orchestrator.seq_len must be at most the trainer's \(64\), got 128"):
        async with start(make_config(mesh.services, seq_len=128, **new)):
            pass
    train = {"env": [{"id": "math"}]}
    with pytest.raises(RunError, match="names 'math', which the rollout service does not host; it has echo"):
        async with start(make_config(mesh.services, train=train, **new)):
            pass
    with pytest.raises(RunError, match="run_id 'other' is not a run of the trainer; it has main"):
        async with start(make_config(mesh.services, run_id="other")):
            pass


async def test_groups_that_would_come_back_too_old_are_cancelled(mesh, script, make_config, start) -> None:
    script.step_s = 0.01
    script.delay = lambda request: 600.0 if request.task_index % 3 == 0 and script.engine_version == 0 else 0.0
    config = make_config(mesh.services, max_async_level=2, max_off_policy_steps=0, max_steps=3)
    async with start(config) as (loop, journal):
        await loop.train()
    assert any(stop.is_set() for stop in script.cancelled_groups.values())
    assert journal.ledger.balance().cancelled > 0
    assert journal.ledger.balance().exact
    assert set(staleness(script)) == {0}


async def test_a_mesh_without_engines_is_said_so(mesh, script, make_config, start, monkeypatch) -> None:
    script.engines = 0
    async with start(make_config(mesh.services)) as (loop, _):
        monkeypatch.setattr(loop.relay, "_deadlines", DeadlinesConfig(startup_s=0.3))
        with pytest.raises(RunError, match=r"weight hub at .* has 0 inference engines after 0.3 s, need 1; start `inf"):
            await loop.train()


async def test_status_compares_the_last_step_with_the_version_of_that_step(
    mesh, script, make_config, start, tmp_path
) -> None:
    config = make_config(mesh.services, max_steps=4)
    async with start(config) as (loop, _):
        await loop.train()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]))  # the trainer is two steps ahead of the last record
    dump_toml(config, tmp_path / "configs" / "orchestrator.toml")
    rows = {row.service: row for row in (await read_status(RunFolder(tmp_path))).rows}
    assert rows["trainer"].version == 4
    assert (rows["orchestrator"].version, rows["orchestrator"].lag) == (2, 0)


async def test_a_suspended_run_waits_beyond_its_deadlines_and_goes_on_once_it_is_resumed(
    mesh, script, make_config, start, tmp_path, said, monkeypatch
) -> None:
    script.step_holds[2] = asyncio.Event()
    config = make_config(mesh.services, max_async_level=1, deadlines={"step_s": 60.0})
    async with start(config) as (loop, journal):
        training = asyncio.create_task(loop.train())
        await until(lambda: 3 in script.batches)  # one trains and one waits; the next is refused
        mesh.trainer.book.suspension = Suspension(message="no room on its disk")
        await until(lambda: any("the run main is suspended: no room on its disk; `meshrl run" in line for line in said))
        events, before_s = asyncio.get_running_loop(), asyncio.get_running_loop().time
        monkeypatch.setattr(events, "time", lambda: before_s() + 61.0)
        await asyncio.sleep(0.1)  # whatever is due by now has its turn
        assert not training.done()
        mesh.trainer.book.suspension = None
        script.step_holds[2].set()
        await training
        journal.end()
    assert sorted(step for event, step in script.log if event == "trained") == [1, 2, 3, 4]
    assert_exact(tmp_path, 4)
