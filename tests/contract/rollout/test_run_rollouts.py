"""RunRollouts through a real channel, with a scripted engine behind real HTTP."""

import asyncio
import json
import re
import time
from contextlib import aclosing

import grpc
import numpy as np
import pytest

from meshrl.v1 import rollout_pb2, rollout_pb2_grpc
from meshrl.wire.errors import Reason
from meshrl.wire.types import Rollout, RolloutFailure, RolloutSummary, Sampling
from polling import until


async def test_a_rollout_carries_tokens_mask_logprobs_versions_roles_and_rewards(
    start_mesh, engine, make_group, tokens
):
    engine.version, engine.spans = 4, lambda n: [[0, 2, 3], [2, n, 4]]
    mesh, asked_s = await start_mesh([engine]), time.time()
    rollout, summary = await mesh.collect(make_group(group_id="g"))
    assert isinstance(rollout, Rollout)
    (sample,) = rollout.samples
    prompt = sample.token_ids.tolist()[:-4]
    assert engine.requests[0]["token_ids"] == prompt
    assert sample.token_ids.tolist()[-4:] == [*tokens("cat"), 2]
    assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * 4
    np.testing.assert_allclose(sample.logprobs[-4:], [-0.5, -0.51, -0.52, -0.53], rtol=1e-6)
    assert not sample.logprobs[:-4].any()
    start = len(prompt)
    assert [(s.start, s.end, s.version) for s in sample.version_spans] == [
        (start, start + 2, 3),
        (start + 2, start + 4, 4),
    ]
    assert rollout.oldest_version == 3
    assert [span.role for span in sample.message_spans] == ["system", "user", "assistant"]
    assert sample.message_spans[-1].end == len(sample.token_ids)
    assert sample.temperature == pytest.approx(0.7)
    assert rollout.reward == pytest.approx(2.25)
    assert dict(rollout.reward_parts) == {"exact": 2.0, "short": 0.25}
    assert dict(rollout.metrics) == {"reply_chars": 3.0}
    assert (rollout.finish_reason, rollout.truncated, rollout.num_turns, rollout.completion) == (
        "stop",
        False,
        1,
        "cat",
    )
    assert (rollout.group_id, rollout.environment, rollout.agent) == ("g", "mesh_echo", "")
    assert set(rollout.timings_s) == {"setup", "generation", "scoring", "total"}
    assert rollout.timings_s["total"] > rollout.timings_s["generation"] > 0
    assert asked_s <= rollout.start_time < rollout.end_time <= time.time()
    assert rollout.end_time - rollout.start_time == pytest.approx(rollout.timings_s["total"], abs=1e-3)
    assert summary == RolloutSummary(finished=1, failed=0, cancelled=0, sampled_tokens=4)


async def test_each_rollout_streams_when_it_is_scored_and_the_summary_is_last(start_mesh, engine, make_group):
    gate = asyncio.Event()

    async def slow(request, body):
        if body["sampling_params"]["seed"] == 100:
            await gate.wait()

    engine.on_call = slow
    mesh = await start_mesh([engine])
    events = []
    async with aclosing(mesh.client.run_rollouts(make_group(group_size=3, sampling=Sampling(seed=100)))) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == 2:
                gate.set()
    assert [type(event) for event in events] == [Rollout, Rollout, Rollout, RolloutSummary]
    assert len({event.rollout_id for event in events[:3]}) == 3
    assert events[-1].finished == 3


async def test_sampling_of_the_request_goes_over_the_environment_over_the_server(start_mesh, engine, make_group):
    env = [{"id": "mesh_echo", "sampling": {"top_p": 0.9, "temperature": 0.5}}]
    mesh = await start_mesh([engine], env=env)
    sampling = Sampling(temperature=1.5, top_k=7, min_p=0.05, seed=40, stop_token_ids=(9,))
    await mesh.collect(make_group(group_size=2, sampling=sampling))
    sent = sorted((request["sampling_params"] for request in engine.requests), key=lambda params: params["seed"])
    assert [params["seed"] for params in sent] == [40, 41]
    assert (sent[0]["temperature"], sent[0]["top_p"], sent[0]["top_k"], sent[0]["min_p"]) == (1.5, 0.9, 7, 0.05)
    assert (sent[0]["max_tokens"], sent[0]["stop_token_ids"]) == (16, [2, 9])
    info = (await mesh.client.list_environments())[0]
    assert info.default_sampling == Sampling(temperature=0.5, top_p=0.9, max_tokens=16)


async def test_environments_are_listed_with_their_tasks_and_agents(start_mesh, engine):
    env = [
        {"id": "mesh_echo"},
        {"id": "mesh_echo", "name": "endless", "args": {"endless": True}},
        {"id": "mesh_debate"},
    ]
    mesh = await start_mesh([engine], env=env)
    infos = await mesh.client.list_environments()
    assert [(info.name, info.taskset, info.num_tasks, info.agents) for info in infos] == [
        ("mesh_echo", "mesh_echo", 3, ("agent",)),
        ("endless", "mesh_echo", None, ("agent",)),
        ("mesh_debate", "mesh_debate", 1, ("pro", "con", "referee")),
    ]


async def test_two_environments_play_at_once_and_an_endless_one_reaches_any_index(start_mesh, engine, make_group):
    env = [{"id": "mesh_echo"}, {"id": "mesh_echo", "name": "endless", "args": {"endless": True}}]
    mesh = await start_mesh([engine], env=env)
    one, two, again = await asyncio.gather(
        mesh.collect(make_group(task_index=1)),
        mesh.collect(make_group(environment="endless", task_index=7)),
        mesh.collect(make_group(environment="endless", task_index=2)),
    )
    assert [events[0].environment for events in (one, two, again)] == ["mesh_echo", "endless", "endless"]
    assert len({one[0].task_key, two[0].task_key, again[0].task_key}) == 3


async def test_a_task_of_the_callers_own_is_played_from_its_json(start_mesh, engine, make_group):
    mesh = await start_mesh([engine])
    payload = json.dumps({"prompt": "say cat", "word": "cat"})
    rollout, _ = await mesh.collect(make_group(task_payload=payload))
    assert rollout.reward_parts["exact"] == 2.0
    error = await mesh.refused(make_group(task_payload=json.dumps({"word": 3})))
    assert error.reason is Reason.INVALID_REQUEST
    assert [violation.field for violation in error.violations] == ["task_payload.word"]


async def test_a_broken_reward_is_a_failure_of_its_rollout_only(start_mesh, engine, make_group):
    mesh = await start_mesh(
        [engine], env=[{"id": "mesh_echo"}, {"id": "mesh_echo", "name": "bad", "args": {"break_reward": True}}]
    )
    failure, other, summary = await mesh.collect(make_group(environment="bad", group_size=2))
    assert isinstance(failure, RolloutFailure)
    assert isinstance(other, RolloutFailure)
    assert failure.reason == "ENVIRONMENT_FAILED"
    assert "this reward is broken" in failure.message
    assert summary == RolloutSummary(finished=0, failed=2, cancelled=0, sampled_tokens=0)
    rollout, _ = await mesh.collect(make_group())
    assert isinstance(rollout, Rollout)
    status = await mesh.client.get_status()
    assert (status.finished, dict(status.failures)) == (1, {"ENVIRONMENT_FAILED": 2})


async def test_unknown_names_and_bad_fields_are_refused_with_their_reason(start_mesh, engine, make_group):
    mesh = await start_mesh([engine])
    assert (await mesh.refused(make_group(environment="nowhere"))).reason is Reason.UNKNOWN_ENVIRONMENT
    assert (await mesh.refused(make_group(task_index=3))).reason is Reason.UNKNOWN_TASK
    assert (await mesh.refused(make_group(engine_pool="other"))).reason is Reason.INVALID_REQUEST
    error = await mesh.refused(make_group(group_size=0, deadline_s=-1.0, sampling=Sampling(top_p=2.0)))
    assert {violation.field for violation in error.violations} == {"group_size", "deadline_s", "sampling.top_p"}


async def test_rollouts_alive_at_the_deadline_are_failures(start_mesh, engine, make_group, pass_time):
    engine.delay_s = 600.0
    mesh = await start_mesh([engine], max_concurrent=1)
    playing = asyncio.create_task(mesh.collect(make_group(group_size=2, deadline_s=90.0)))
    await engine.arrived.get()
    pass_time(90.0)
    *failures, summary = await playing
    assert [failure.reason for failure in failures] == ["DEADLINE_PASSED"] * 2
    assert failures[0].retryable
    late = "not finished within deadline_s = 90: it was"
    assert re.match(rf"{late} in a model call at {engine.url}, [\d.]+ s into this stage$", failures[0].message)
    assert failures[1].message == "not finished within deadline_s = 90: it waited for a place in max_concurrent"
    assert summary.failed == 2
    assert (await mesh.client.get_status()).running == 0


async def test_a_late_rollout_says_which_stage_it_was_in(start_mesh, engine, make_engine, make_group, pass_time):
    away = await make_engine(health=503).start()
    slow = await start_mesh([engine], env=[{"id": "mesh_slow"}])
    waiting = await start_mesh([away], client={"failover_s": 600.0})
    stages = (
        "in the set-up of task and harness",
        "in the task's finalize",
        "in its rewards",
        "waiting for an engine to take its model call (no engine is reachable)",
    )
    requests = [make_group(environment="mesh_slow", task_index=index, deadline_s=90.0) for index in range(3)]
    groups = asyncio.gather(*map(slow.collect, requests), waiting.collect(make_group(deadline_s=90.0)))
    there = [f"it was {stage}" for stage in stages]
    await until(lambda: sum(said.startswith(tuple(there)) for said in slow.doing() + waiting.doing()) == len(there))
    pass_time(90.0)
    for (failure, _), doing in zip(await groups, there, strict=True):
        assert failure.message.startswith(f"not finished within deadline_s = 90: {doing}")
    await away.stop()


async def test_a_task_that_is_not_drawn_by_the_deadline_fails_the_group(start_mesh, engine, make_group):
    mesh = await start_mesh([engine], env=[{"id": "mesh_echo", "args": {"endless": True}}])
    failure, summary = await mesh.collect(make_group(task_index=10**12, deadline_s=0.2))
    assert (failure.reason, failure.retryable) == ("DEADLINE_PASSED", True)
    assert failure.message == (
        "not finished within deadline_s = 0.2: task 1000000000000 of mesh_echo was still being drawn; a later group may"
        " get it"
    )
    assert summary == RolloutSummary(finished=0, failed=1, cancelled=0, sampled_tokens=0)
    (rollout,) = (await mesh.collect(make_group(task_index=5)))[:-1]
    assert isinstance(rollout, Rollout)


async def test_cancelled_groups_end_with_a_summary(start_mesh, engine, make_group):
    engine.delay_s = 600.0
    mesh = await start_mesh([engine], max_concurrent=2)
    running = asyncio.create_task(mesh.collect(make_group(group_id="a", group_size=3)))
    other = asyncio.create_task(mesh.collect(make_group(group_id="b", group_size=1)))
    await engine.arrived.get()
    await engine.arrived.get()
    status = await mesh.client.get_status()
    assert (status.running, status.queued) == (2, 2)
    assert await mesh.client.cancel_rollouts(["a", "unknown"]) == 3
    assert await running == [RolloutSummary(finished=0, failed=0, cancelled=3, sampled_tokens=0)]
    assert not other.done()
    assert await mesh.client.cancel_rollouts() == 1
    assert (await other)[-1].cancelled == 1


async def test_a_caller_that_goes_away_cancels_its_group_with_its_model_calls(start_mesh, engine, make_group):
    engine.delay_s = 600.0
    mesh = await start_mesh([engine])
    task = asyncio.create_task(mesh.collect(make_group(group_size=2, deadline_s=300.0)))
    await engine.arrived.get()
    await engine.arrived.get()
    task.cancel()
    async with asyncio.timeout(60.0):  # sooner than the drain, or the engine, would end it
        await mesh.runner.drain(300.0)
        while (await mesh.client.get_status()).engines[0].in_flight:  # noqa: ASYNC110  # what the server says of itself
            await asyncio.sleep(0.02)
    assert (await mesh.client.get_status()).running == 0


async def test_a_full_queue_refuses_and_takes_work_again_later(start_mesh, engine, make_group):
    gate = engine.hold()
    mesh = await start_mesh([engine], max_concurrent=1, max_queued=1)
    first = asyncio.create_task(mesh.collect(make_group(group_size=2)))
    await engine.arrived.get()
    error = await mesh.refused(make_group())
    assert error.reason is Reason.OVERLOADED
    assert error.retry_after_s is not None
    gate.set()
    assert (await first)[-1].finished == 2
    assert (await mesh.collect(make_group()))[-1].finished == 1


async def test_a_draining_server_finishes_what_runs_and_refuses_more(start_mesh, engine, make_group):
    gate = engine.hold()
    mesh = await start_mesh([engine])
    running = asyncio.create_task(mesh.collect(make_group()))
    await engine.arrived.get()
    drain = asyncio.create_task(mesh.runner.drain(60.0))
    await asyncio.sleep(0)
    assert (await mesh.refused(make_group())).reason is Reason.DRAINING
    assert (await mesh.client.get_status()).draining
    gate.set()
    assert (await running)[-1].finished == 1
    await drain


async def test_the_rollout_has_its_own_trace_which_reaches_the_engine(start_mesh, engine, make_group):
    mesh = await start_mesh([engine])
    caller = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    rollout, _ = await mesh.collect(make_group(traceparent=caller))
    assert rollout.traceparent
    assert rollout.traceparent != caller
    assert engine.headers[0]["traceparent"].split("-")[1] == rollout.traceparent.split("-")[1]
    assert engine.headers[0]["X-Session-ID"] == rollout.rollout_id.replace("-", "")


async def test_a_prompt_in_parts_has_the_tokens_of_the_same_text(start_mesh, engine, make_group):
    environments = [{"id": "mesh_echo"}, {"id": "mesh_echo", "name": "parts", "args": {"parts": True}}]
    mesh = await start_mesh([engine], env=environments)
    whole, _ = await mesh.collect(make_group())
    in_parts, _ = await mesh.collect(make_group(environment="parts"))
    assert isinstance(in_parts, Rollout), in_parts
    assert in_parts.samples[0].token_ids.tolist() == whole.samples[0].token_ids.tolist()
    assert in_parts.samples[0].message_spans == whole.samples[0].message_spans


async def test_an_image_in_a_prompt_fails_the_rollout_by_the_type_of_the_part(start_mesh, engine, make_group):
    mesh = await start_mesh([engine], env=[{"id": "mesh_echo", "args": {"parts": True, "image": "https://a/b.png"}}])
    failure, _ = await mesh.collect(make_group())
    assert isinstance(failure, RolloutFailure)
    assert "a part of type 'image_url'" in failure.message


async def test_a_drain_takes_no_new_group_and_ends_those_that_run_at_its_deadline(start_mesh, engine, make_group):
    mesh = await start_mesh([engine])
    engine.on_call = lambda request, body: asyncio.sleep(60.0)
    playing = asyncio.create_task(mesh.collect(make_group(group_size=2, deadline_s=50.0)))
    await engine.arrived.get()
    async with grpc.aio.insecure_channel(mesh.client.address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        request = rollout_pb2.RolloutServiceDrainRequest(deadline_s=0.2, message="moving")
        answer = await stub.Drain(request, timeout=30.0)
    assert answer.cancelled == 2
    assert (await playing)[-1] == RolloutSummary(finished=0, failed=0, cancelled=2, sampled_tokens=0)
    assert (await mesh.client.get_status()).draining
    assert (await mesh.refused(make_group())).reason is Reason.DRAINING
