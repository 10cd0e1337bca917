"""Calls that end before they begin, and rollouts that evaluations lose: asked for again, and never hidden."""

import asyncio
from collections import Counter

import pytest

from meshrl.orchestrator.config import EvalConfig, EvalEnvConfig
from run_output import assert_exact, records


async def test_a_stream_that_the_server_cancels_before_its_first_event_is_asked_for_again(
    mesh, script, make_config, start, tmp_path
) -> None:
    asked: Counter[str] = Counter()

    def cancels(request) -> bool:
        asked[request.group_id] += 1
        return asked[request.group_id] <= 2

    script.cancels = cancels
    async with start(make_config(mesh.services, max_steps=3)) as (loop, journal):
        await asyncio.wait_for(loop.train(), 60.0)
        journal.end()
    report = assert_exact(tmp_path, 3)
    assert report.counts["trained", ""] == 24
    assert not [reason for state, reason in report.counts if state == "failed"]


async def test_a_server_that_cancels_later_than_it_may_be_away_is_asked_again_all_the_same(
    mesh, script, make_config, start
) -> None:
    """gRPC cancels after 30 s, by default more than unreachable_s: the service is there, it is busy."""
    asked: Counter[str] = Counter()

    def cancels(request) -> bool:
        asked[request.group_id] += 1
        return asked[request.group_id] <= 4

    script.cancels = cancels
    deadlines = {"unreachable_s": 0.01}
    async with start(make_config(mesh.services, max_steps=1, deadlines=deadlines)) as (loop, _):
        await asyncio.wait_for(loop.train(), 60.0)
    assert script.trained_version == 1


def eval_config(**changes) -> EvalConfig:
    values = {"env": [EvalEnvConfig(id="echo", name="echo")], "num_examples": 6, "eval_final": False, "group_size": 2}
    return EvalConfig.model_validate(values | changes)


def eval_record(folder) -> dict[str, float]:
    return next(line for line in records(folder) if "eval/version" in line)


async def test_an_evaluation_repeats_what_it_has_lost(mesh, script, make_config, start, tmp_path, said, warned) -> None:
    failed: Counter[tuple[int, bool]] = Counter()

    def fails(request, place) -> bool:
        if not request.scores_only or request.task_index % 2:
            return False
        failed[request.task_index, place == 0] += 1
        return failed[request.task_index, place == 0] == 1

    script.fails = fails
    async with start(make_config(mesh.services, max_steps=1, eval=eval_config())) as (loop, _):
        await asyncio.wait_for(loop.train(), 60.0)
    record = eval_record(tmp_path)
    assert sum(failed.values()) == 12
    assert (record["eval/echo/scored"], record["eval/echo/asked"]) == (12, 12)
    assert record["eval/echo/failed"] == 0.0
    assert "evaluation of version 0 in echo scored 12 of 12 rollouts" in said
    assert not [line for line in warned if "scored" in line]


async def test_an_evaluation_says_what_it_could_not_score(mesh, script, make_config, start, tmp_path, warned) -> None:
    script.fails = lambda request, place: request.scores_only and request.task_index == 3
    async with start(make_config(mesh.services, max_steps=1, eval=eval_config())) as (loop, _):
        await asyncio.wait_for(loop.train(), 60.0)
    record = eval_record(tmp_path)
    assert (record["eval/echo/scored"], record["eval/echo/asked"]) == (10, 12)
    assert record["eval/echo/failed"] == pytest.approx(2 / 12)
    assert sum(request.scores_only and request.task_index == 3 for request in script.requests) == 3
    (line,) = (line for line in warned if "scored 10 of 12 rollouts" in line)
    assert "ENVIRONMENT_FAILED: scripted crash" in line
