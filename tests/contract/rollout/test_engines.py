"""Engines that die, lag behind or change their weights while rollouts run."""

import asyncio
import time

import pytest
from aiohttp import web

from meshrl.wire.errors import Reason
from meshrl.wire.types import Rollout, RolloutFailure


def cut(request: web.Request, body: object) -> None:
    """Drops the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()


async def test_a_call_moves_to_another_engine_when_the_first_dies_without_an_answer(
    start_mesh, make_group, engine, second
):
    mesh = await start_mesh([engine, second])
    engine.on_call = cut
    await engine_takes_a_call_first(mesh, engine, second)
    rollout, summary = await mesh.collect(make_group())
    assert isinstance(rollout, Rollout)
    assert (len(engine.requests), len(second.requests)) == (1, 1)
    assert summary.finished == 1


async def engine_takes_a_call_first(mesh, engine, second):
    """Makes the other engine look busy, so that the next call goes to `engine`."""
    for known in mesh.runner._servers.engines.listed:
        known.rate.running = 5 if known.url == second.url else 0


async def test_without_any_engine_the_rollout_fails_as_the_engines_fault(start_mesh, make_group, engine):
    mesh = await start_mesh([engine], client={"failover_s": 0.5})
    await engine.stop()
    failure, _ = await mesh.collect(make_group())
    assert isinstance(failure, RolloutFailure)
    assert (failure.reason, failure.retryable) == ("ENGINE_FAILED", True)
    assert (await mesh.client.get_status()).engines[0].healthy is False


async def test_calls_leave_an_engine_that_went_silent(start_mesh, make_group, engine, second):
    """Its connections stay open: a stopped process, or one whose event loop hangs."""
    mesh = await start_mesh([engine, second], client={"failover_s": 1.5, "probe_deadline_s": 0.5})
    await engine_takes_a_call_first(mesh, engine, second)
    engine.delay_s = engine.silent_s = 600.0
    rollout, summary = await mesh.collect(make_group())
    assert isinstance(rollout, Rollout)
    assert (len(engine.requests), len(second.requests), summary.finished) == (1, 1, 1)


async def test_a_slow_engine_that_gives_signs_of_life_keeps_its_calls(start_mesh, make_group, engine, second):
    mesh = await start_mesh([engine, second], client={"failover_s": 2.0})
    await engine_takes_a_call_first(mesh, engine, second)
    engine.delay_s = 5.0
    rollout, _ = await mesh.collect(make_group())
    assert isinstance(rollout, Rollout)
    assert (len(engine.requests), len(second.requests)) == (1, 0)


async def test_a_long_call_that_is_lost_still_has_its_time_to_find_another_engine(
    start_mesh, make_group, engine, second
):
    second.health = 503
    mesh = await start_mesh([engine, second], client={"failover_s": 2.0})

    async def late_cut(request, body):
        await asyncio.sleep(2.1)
        engine.health = 503
        asyncio.get_running_loop().call_later(0.1, setattr, second, "health", 200)
        cut(request, body)

    engine.on_call = late_cut
    rollout, _ = await mesh.collect(make_group())
    assert isinstance(rollout, Rollout)
    assert (len(engine.requests), len(second.requests)) == (1, 1)


async def test_a_call_waits_for_an_engine_that_comes_back(start_mesh, make_group, engine):
    mesh = await start_mesh([engine], client={"failover_s": 5.0})
    answers = [web.json_response({"error": "starting"}, status=503)]
    engine.on_call = lambda request, body: answers.pop() if answers else None
    rollout, _ = await mesh.collect(make_group())
    assert isinstance(rollout, Rollout)
    assert len(engine.requests) == 2


async def test_the_only_engine_is_found_as_soon_as_it_is_back(start_mesh, make_group, engine):
    """A call that waits looks for itself, and not only at the rounds of every probe_interval_s."""
    mesh = await start_mesh([engine], client={"failover_s": 60.0, "probe_interval_s": 3600.0})
    engine.health = 503

    def lost(request, body):
        if engine.health == 503:
            cut(request, body)
            asyncio.get_running_loop().call_later(0.5, setattr, engine, "health", 200)

    engine.on_call = lost
    rollout, _ = await mesh.collect(make_group(deadline_s=90.0))
    assert isinstance(rollout, Rollout)
    assert len(engine.requests) == 2


async def test_a_busy_engine_is_not_asked_again_before_it_wants_to_be(start_mesh, make_group, engine):
    mesh = await start_mesh([engine], client={"failover_s": 30.0})
    asked_s = []

    def answer(request, body):
        asked_s.append(time.monotonic())
        return web.json_response({}, status=503, headers={"Retry-After": "2"}) if len(asked_s) == 1 else None

    engine.on_call = answer
    rollout, _ = await mesh.collect(make_group(deadline_s=60.0))
    assert isinstance(rollout, Rollout)
    assert asked_s[1] - asked_s[0] >= 2.0


async def test_an_answer_broken_off_is_not_asked_for_again(start_mesh, make_group, engine, second):
    async def half(request, body):
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices"')
        request.transport.abort()
        return response

    engine.on_call = second.on_call = half
    mesh = await start_mesh([engine, second])
    failure, _ = await mesh.collect(make_group())
    assert (failure.reason, failure.retryable) == ("ENGINE_FAILED", True)
    assert len(engine.requests) + len(second.requests) == 1


async def test_an_answer_without_evidence_of_its_tokens_fails_the_rollout(start_mesh, make_group, engine):
    answer = {"choices": [{"token_ids": [5, 2], "finish_reason": "stop"}]}
    engine.on_call = lambda request, body: web.json_response(answer)
    mesh = await start_mesh([engine])
    failure, _ = await mesh.collect(make_group())
    assert failure.reason == "ENGINE_FAILED"


async def test_a_minimum_version_that_no_engine_serves_is_refused_with_a_time_to_retry(start_mesh, make_group, engine):
    engine.version = 2
    mesh = await start_mesh([engine])
    error = await mesh.refused(make_group(min_version=3))
    assert error.reason is Reason.VERSION_NOT_AVAILABLE
    assert error.retry_after_s == pytest.approx(0.1)
    assert "newest version served is 2" in error.message
    assert engine.requests == []
    engine.version = 3
    rollout, _ = await mesh.collect(make_group(min_version=3))
    assert rollout.oldest_version == 3


async def test_an_exact_version_that_changes_while_tokens_are_sampled_fails_the_rollout(start_mesh, make_group, engine):
    engine.version, engine.spans = 5, lambda n: [[0, 1, 5], [1, n, 6]]
    mesh = await start_mesh([engine])
    failure, _ = await mesh.collect(make_group(exact_version=5))
    assert failure.reason == "VERSION_NOT_AVAILABLE"
    assert "came from version 6" in failure.message


async def test_an_engine_without_spans_counts_with_the_older_version_around_the_call(start_mesh, make_group, engine):
    engine.version = 4

    async def swap(request, body):
        await asyncio.sleep(0.05)
        engine.version = 5
        await asyncio.sleep(0.3)

    engine.on_call = swap
    mesh = await start_mesh([engine])
    rollout, _ = await mesh.collect(make_group())
    assert rollout.oldest_version == 4


async def test_a_multi_turn_rollout_is_one_sample_while_prompts_extend_the_last(start_mesh, make_group, engine, tokens):
    replies = iter(["one", "two", "three"])
    engine.reply = lambda request: next(replies)
    engine.spans = lambda n: [[0, n, 7 + len(engine.requests)]]
    mesh = await start_mesh([engine], env=[{"id": "mesh_guess", "args": {"turns": 3}}])
    rollout, summary = await mesh.collect(make_group(environment="mesh_guess"))
    (sample,) = rollout.samples
    assert (rollout.num_turns, rollout.reward, summary.sampled_tokens) == (3, 1.0, 14)
    assert [span.role for span in sample.message_spans] == ["user", "assistant"] * 3
    sampled = [sample.token_ids[span.start : span.end].tolist() for span in sample.version_spans]
    assert sampled == [[*tokens(word), 2] for word in ("one", "two", "three")]
    assert [span.version for span in sample.version_spans] == [8, 9, 10]
    assert int(sample.loss_mask.sum()) == 14
    assert engine.requests[1]["token_ids"][: len(engine.requests[0]["token_ids"]) + 4] == [
        *engine.requests[0]["token_ids"],
        *tokens("one"),
        2,
    ]
    assert len({headers["X-Session-ID"] for headers in engine.headers}) == 1


async def test_a_history_that_renders_otherwise_splits_into_samples(start_mesh, make_group, engine, tokens):
    """The reply holds a special token that its text does not, so the next prompt does not extend it exactly."""
    engine.reply = lambda request: [*tokens("ab"), 1, *tokens("c")]
    mesh = await start_mesh([engine], env=[{"id": "mesh_guess", "args": {"turns": 2}}])
    rollout, summary = await mesh.collect(make_group(environment="mesh_guess"))
    assert len(rollout.samples) == 2
    assert rollout.num_turns == 2
    for sample, request in zip(rollout.samples, engine.requests, strict=True):
        assert sample.token_ids.tolist() == [*request["token_ids"], *tokens("ab"), 1, *tokens("c"), 2]
        assert sample.loss_mask.nonzero()[0].tolist() == list(range(len(sample.token_ids) - 5, len(sample.token_ids)))
    assert summary.sampled_tokens == 10


async def test_a_reply_cut_at_its_limit_is_truncated(start_mesh, make_group, engine):
    engine.reply = lambda request: "x" * 100
    mesh = await start_mesh([engine], sampling={"max_tokens": 4})
    rollout, _ = await mesh.collect(make_group())
    assert (rollout.finish_reason, rollout.truncated, rollout.completion) == ("length", True, "xxxx")


async def test_a_session_keeps_its_engine_over_turns_and_moves_when_that_dies(start_mesh, make_group, engine, second):
    mesh = await start_mesh([engine, second], env=[{"id": "mesh_guess", "args": {"turns": 3}}])
    await mesh.collect(make_group(environment="mesh_guess"))
    assert sorted((len(engine.requests), len(second.requests))) == [0, 3]
    engine.requests.clear()
    second.requests.clear()
    engine.on_call = lambda request, body: cut(request, body) if len(engine.requests) == 2 else None
    await engine_takes_a_call_first(mesh, engine, second)
    rollout, _ = await mesh.collect(make_group(environment="mesh_guess"))
    assert rollout.num_turns == 3
    assert len(rollout.samples) == 1
    assert (len(engine.requests), len(second.requests)) == (2, 2)


async def test_a_prompt_longer_than_the_context_fails(start_mesh, make_group, engine):
    mesh = await start_mesh([engine], seq_len=20)
    failure, _ = await mesh.collect(make_group())
    assert "exceeds maximum context length (19): rollout.seq_len is 20; raise it" in failure.message
    assert not failure.retryable
    assert engine.requests == []


async def test_agents_that_train_become_rollouts_of_their_own(start_mesh, make_group, engine):
    mesh = await start_mesh([engine], env=[{"id": "mesh_debate"}])
    pro, con, summary = await mesh.collect(make_group(environment="mesh_debate"))
    assert {pro.agent, con.agent} == {"pro", "con"}
    assert pro.metrics["rounds"] == con.metrics["rounds"] == 1.0
    assert summary.finished == 1
    assert len(engine.requests) == 3


async def test_an_environment_may_have_shorter_sequences_than_the_program(start_mesh, engine, make_group):
    engine.reply = lambda request: "a" * 400
    entries = [{"id": "mesh_echo", "name": "whole"}, {"id": "mesh_echo", "name": "short", "seq_len": 90}]
    mesh = await start_mesh([engine], env=entries, seq_len=200, sampling={"max_tokens": 400, "temperature": 1.0})
    lengths = {}
    for name in ("whole", "short"):
        rollout, _ = await mesh.collect(make_group(environment=name))
        lengths[name] = rollout.num_tokens
    assert lengths == {"whole": 200, "short": 90}
