"""Rollouts that no trainer takes: they are lost one by one, and the run goes on."""

import asyncio
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from meshrl.core.clock import Clock
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.sampling.retry import RunError
from meshrl.wire.types import Rollout, Sample, VersionSpan
from polling import until
from run_output import assert_exact, query, step_records

PATIENT = {"unreachable_s": 60.0}


def with_sample(**changes):
    def alter(rollout: Rollout) -> Rollout:
        return replace(rollout, samples=(replace(rollout.samples[0], **changes),))

    return alter


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


NOTHING = Sample(
    token_ids=np.zeros(0, np.int32), loss_mask=np.zeros(0, np.bool_), logprobs=np.zeros(0, np.float32), version_spans=()
)
BAD = {
    "logprob_above_0": (with_sample(logprobs=f32(0, 0, -1, 0.5, -1)), "samples[0].logprobs"),
    "logprob_nan": (with_sample(logprobs=f32(0, 0, -1, np.nan, -1)), "samples[0].logprobs"),
    "logprob_minus_infinity": (with_sample(logprobs=f32(0, 0, -1, -np.inf, -1)), "samples[0].logprobs"),
    "token_outside_the_vocabulary": (with_sample(token_ids=np.array([0, 1, 2, 3, 100], np.int32)), "[0].token_ids"),
    "token_below_0": (with_sample(token_ids=np.array([0, -1, 2, 3, 4], np.int32)), "samples[0].token_ids"),
    "first_token_sampled": (
        with_sample(loss_mask=np.ones(5, np.bool_), version_spans=(VersionSpan(start=0, end=5, version=0),)),
        "samples[0].loss_mask",
    ),
    "greedy": (with_sample(temperature=0.0), "samples[0].temperature"),
    "temperature_below_0": (with_sample(temperature=-1.0), "samples[0].temperature"),
    "temperature_nan": (with_sample(temperature=float("nan")), "samples[0].temperature"),
    "version_from_the_future": (
        with_sample(version_spans=(VersionSpan(start=2, end=5, version=10**6),)),
        "samples[0].version_spans",
    ),
    "no_token": (lambda rollout: replace(rollout, samples=(*rollout.samples, NOTHING)), "samples[1].token_ids"),
    "unequal_lengths": (with_sample(logprobs=f32(0, 0, -1)), "samples[0].logprobs"),
    "another_environment": (lambda rollout: replace(rollout, environment="other"), "environment"),
    "another_group": (lambda rollout: replace(rollout, group_id="other"), "group_id"),
    "no_id": (lambda rollout: replace(rollout, rollout_id=""), "rollout_id"),
}


async def record_two_batches(mesh, start, config: OrchestratorConfig) -> None:
    """A process of the orchestrator records two batches, of which none is uploaded, and ends."""
    async with start(config) as (loop, _):
        await mesh.kill_trainer()
        running = asyncio.create_task(loop.train())
        await until(lambda: running.done() or query(config.output_dir, "SELECT 1 FROM steps WHERE step = 2"))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_rollouts_that_cannot_be_trained_are_lost_alone(
    mesh, script, make_config, start, tmp_path, warned
) -> None:
    kinds = cycle(BAD.values())
    script.alter = lambda request, place, rollout: next(kinds)[0](rollout) if place < 2 else rollout
    script.reward = lambda request, place: float(place == 2)
    async with start(make_config(mesh.services, max_steps=5)) as (loop, journal):  # ten groups with two bad ones each
        await asyncio.wait_for(loop.train(), 60.0)
        journal.end()
    found = assert_exact(tmp_path, 5).counts
    assert (found["trained", ""], found["failed", "BAD_ROLLOUT"] >= 20) == (20, True)
    assert script.refused_batches == []
    assert [line["errored_rollouts/echo"] for line in step_records(tmp_path)] == [0.5] * 5
    said = [text for text in warned if mesh.services.rollout[0] in text and "'echo'" in text]
    assert [kind for kind, (_, field) in BAD.items() if not any(field in text for text in said)] == []


async def test_the_second_rollout_of_an_id_is_lost_alone(mesh, script, make_config, start, tmp_path, warned) -> None:
    script.alter = lambda request, place, rollout: (
        replace(rollout, rollout_id=f"of {rollout.group_id}") if place < 2 else rollout
    )
    async with start(make_config(mesh.services, max_steps=3)) as (loop, journal):
        await asyncio.wait_for(loop.train(), 60.0)
        journal.end()
    assert assert_exact(tmp_path, 3).counts["trained", ""] == 3 * 2 * 3
    assert [line["errored_rollouts/echo"] for line in step_records(tmp_path)] == [0.25] * 3
    assert any("rollout_id must be a UUID of its own" in text for text in warned)


def spoil_tokens_of_first(request, place, rollout):
    if place != 0 or request.task_index % 2:
        return rollout
    return replace(rollout, samples=(replace(rollout.samples[0], token_ids=np.array([0, 1, 2, 3, 999], np.int32)),))


@pytest.mark.parametrize("level", [0, 2])
async def test_a_batch_that_the_trainer_refuses_is_dissolved_and_the_run_goes_on(
    mesh, script, make_config, start, tmp_path, level
) -> None:
    """The trainer does not tell its vocabulary, so that the bad token is found by the trainer alone."""
    script.tells_vocab_size = False
    spoiled: set[str] = set()

    def spoil(request, place, rollout):
        altered = spoil_tokens_of_first(request, place, rollout) if len(spoiled) < 3 else rollout
        if altered is not rollout:
            spoiled.add(rollout.rollout_id)  # more of them would refuse five batches in a row, which ends the run
        return altered

    script.alter = spoil
    async with start(make_config(mesh.services, max_steps=6, max_async_level=level)) as (loop, journal):
        await asyncio.wait_for(loop.train(), 60.0)
        journal.end()
    assert script.refused_batches
    counts, lines = assert_exact(tmp_path, 6).counts, step_records(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert sum(line["dropped/refused_by_trainer"] for line in lines) == counts["dropped", "refused_by_trainer"] >= 1
    assert lines[-1]["progress/samples"] == counts["trained", ""]


async def test_sound_rollouts_of_a_dissolved_batch_are_trained(mesh, script, make_config, start, tmp_path) -> None:
    """The last batch, when nothing else is left to do: what is missing is sampled anew."""
    script.refuses = lambda batch: batch.step == 3 and script.refused_batches.count(3) < 2
    async with start(make_config(mesh.services, max_steps=3, max_async_level=1)) as (loop, journal):
        await asyncio.wait_for(loop.train(), 60.0)
        journal.end()
    assert script.refused_batches == [3, 3]
    assert assert_exact(tmp_path, 3).counts["dropped", "refused_by_trainer"] == 16


async def test_a_trainer_that_refuses_every_batch_ends_the_run(mesh, script, make_config, start) -> None:
    script.refuses = lambda batch: True
    async with start(make_config(mesh.services)) as (loop, _):
        with pytest.raises(RunError, match=r"refused 5 batches in a row.*step 1: INVALID_REQUEST: scripted"):
            await asyncio.wait_for(loop.train(), 60.0)
    assert script.refused_batches == [1] * 5


async def test_a_bad_batch_in_the_journal_does_not_stop_the_next_process(
    mesh, script, make_config, start, tmp_path, monkeypatch
) -> None:
    """As an orchestrator without the check at its door has left it: recorded, and refused at every start."""
    monkeypatch.setattr("meshrl.orchestrator.dispatch.rollout_problems", lambda *_, **__: ())
    spoiled: set[str] = set()

    def spoil(request, place, rollout):
        altered = spoil_tokens_of_first(request, place, rollout)
        if altered is not rollout:
            spoiled.add(rollout.rollout_id)
        return altered

    script.alter = spoil
    config = make_config(mesh.services, max_steps=4, session="s1", checkpoint_interval=2, deadlines=PATIENT)
    await record_two_batches(mesh, start, config)
    monkeypatch.undo()
    script.alter = lambda request, place, rollout: rollout
    await mesh.start_trainer(0)
    recorded = dict(query(tmp_path, "SELECT rollout_id, step FROM rollouts WHERE step > 0"))
    assert set(recorded.values()) == {1, 2}
    assert spoiled & recorded.keys()
    async with start(config) as (loop, journal):
        await asyncio.wait_for(loop.train(), 60.0)
        journal.end()
    assert set(script.refused_batches) <= {1, 2, 3}
    assert_exact(tmp_path, 4)
    trained = {one for (one,) in query(tmp_path, "SELECT rollout_id FROM rollouts WHERE state = 'trained'")}
    assert recorded.keys() - spoiled <= trained
    assert not spoiled & trained


async def test_a_batch_made_anew_has_the_whole_time_of_a_batch(
    mesh, script, make_config, start, tmp_path, monkeypatch
) -> None:
    """Each of the batches waits 6 s for its rollouts by the loop's clock, all of them longer than one may."""
    script.refuses = lambda batch: batch.step == 1 and len(script.refused_batches) < 4
    now_s = 0.0

    def pass_time(request, place, rollout):
        nonlocal now_s
        now_s += 3.0 if place == 0 else 0.0  # two groups a batch
        return rollout

    script.alter = pass_time
    deadlines = PATIENT | {"batch_s": 20.0}
    async with start(make_config(mesh.services, max_steps=1, max_async_level=0, deadlines=deadlines)) as (loop, _):
        monkeypatch.setattr(loop.run, "clock", Clock(now=lambda: now_s))
        await asyncio.wait_for(loop.train(), 60.0)
    assert script.refused_batches == [1] * 4
    (line,) = step_records(tmp_path)
    assert line["time/wait_for_rollouts"] > 20.0, "the record tells of all the waiting"


async def test_a_rollout_that_the_ledger_has_lost_is_counted_when_its_batch_is_dissolved(
    mesh, script, make_config, start, tmp_path
) -> None:
    """The batch is recorded by one process and refused at the next, and the payload was damaged in between."""
    config = make_config(mesh.services, max_steps=2, session="s1", checkpoint_interval=2, deadlines=PATIENT)
    await record_two_batches(mesh, start, config)
    ((damaged,),) = query(tmp_path, "SELECT rollout_id FROM rollouts WHERE step = 1 LIMIT 1")
    query(tmp_path, "UPDATE payloads SET data = x'00' WHERE rollout_id = ?", damaged)
    script.refuses = lambda batch: (
        batch.step == 1 and damaged in {one for row in batch.micro_batches for one in row.rollout_ids}
    )
    await mesh.start_trainer(0)
    async with start(config) as (loop, journal):
        await asyncio.wait_for(loop.train(), 60.0)
        assert journal.ledger.balance().open == 0
        journal.end()
    assert script.refused_batches == [1]
    assert assert_exact(tmp_path, 2).counts["dropped", "payload_damaged"] == 1
