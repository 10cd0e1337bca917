"""Deadlines, retries, cancellation and trace context of calls through a real channel."""

import asyncio
import dataclasses
import time
from contextlib import aclosing

import grpc
import pytest
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from local_ports import free_port
from meshrl.client import ChannelOptions, RolloutClient, TrainerClient
from meshrl.v1 import trainer_pb2
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.trace import context_from, current_traceparent, format_traceparent
from meshrl.wire.types import RolloutFailure, RolloutRequest, RolloutSummary
from polling import until

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REQUEST = RolloutRequest(
    request_id="2f1c59a4-0b6e-4c5e-9c3e-7b1f6d2a8e10",
    group_id="g",
    environment="e",
    task_index=0,
    group_size=1,
    deadline_s=60.0,
)
SUMMARY = RolloutSummary(finished=0, failed=0, cancelled=0, sampled_tokens=0)


def failing_first(times, code, answer):
    left = iter(range(times))

    async def call(request, context):
        if next(left, None) is not None:
            await context.abort(code, "try again")
        return answer

    return call


async def sleeping(request, context):
    await asyncio.sleep(30)


async def summary_only(request, context):
    yield convert.rollout_event_to_proto(SUMMARY)


async def test_unavailable_is_retried_on_an_idempotent_call(mesh, rollout_client, answers):
    answer = answers["GetRolloutStatus"]
    mesh.script.on["GetRolloutStatus"] = failing_first(2, grpc.StatusCode.UNAVAILABLE, answer)
    assert (await rollout_client.get_status()).running == 3
    assert mesh.script.calls == ["GetRolloutStatus"] * 3


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED]
)
async def test_nothing_else_is_retried(mesh, rollout_client, answers, code):
    mesh.script.on["GetRolloutStatus"] = failing_first(1, code, answers["GetRolloutStatus"])
    with pytest.raises(MeshError):
        await rollout_client.get_status()
    assert mesh.script.calls == ["GetRolloutStatus"]


async def test_an_unavailable_call_is_not_repeated_before_the_server_wants_it(mesh, rollout_client, answers):
    """The client's own first wait is 20 ms; the server's RetryInfo asks for more."""
    asked_s = []

    async def call(request, context):
        asked_s.append(time.monotonic())
        if len(asked_s) == 1:
            raise MeshError(Reason.ENGINE_FAILED, "starting", retry_after_s=1.2)
        return answers["GetRolloutStatus"]

    mesh.script.on["GetRolloutStatus"] = call
    assert (await rollout_client.get_status()).running == 3
    assert asked_s[1] - asked_s[0] >= 1.2


async def test_streams_are_not_retried(mesh, rollout_client):
    async def unavailable(request, context):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield

    mesh.script.on["RunRollouts"] = unavailable
    with pytest.raises(MeshError):
        await anext(rollout_client.run_rollouts(REQUEST))
    assert mesh.script.calls == ["RunRollouts"]


async def test_a_draining_server_is_not_asked_twice(mesh, rollout_client):
    async def drains(request, context):
        raise MeshError(Reason.DRAINING)

    mesh.script.on["GetRolloutStatus"] = drains
    with pytest.raises(MeshError) as seen:
        await rollout_client.get_status()
    assert seen.value.reason is Reason.DRAINING
    assert mesh.script.calls == ["GetRolloutStatus"]


async def test_a_stream_ends_at_the_deadline_of_its_request_and_the_margin(mesh):
    deadlines = []

    async def stream(request, context):
        deadlines.append(context.time_remaining())
        if deadlines[-1] < 100.0:
            await asyncio.sleep(30)
        yield convert.rollout_event_to_proto(SUMMARY)

    mesh.script.on["RunRollouts"] = stream
    async with RolloutClient(mesh.address, ChannelOptions(stream_margin_s=0.2)) as client:
        with pytest.raises(MeshError) as seen:
            await anext(client.run_rollouts(dataclasses.replace(REQUEST, deadline_s=0.1)))
    assert seen.value.reason is Reason.DEADLINE_PASSED
    async with RolloutClient(mesh.address, ChannelOptions(stream_margin_s=200.0)) as client:
        assert await anext(client.run_rollouts(dataclasses.replace(REQUEST, deadline_s=300.0))) == SUMMARY
    assert 300.0 < deadlines[1] < 501.0  # gRPC rounds it up


async def test_closing_a_stream_cancels_it_at_the_server(mesh, rollout_client):
    cancelled = asyncio.Event()
    failure = RolloutFailure(rollout_id="o", group_id="g", reason="ENGINE_FAILED", message="m", retryable=True)

    async def stream(request, context):
        try:
            yield convert.rollout_event_to_proto(failure)
            await asyncio.sleep(30)
        finally:
            cancelled.set()

    mesh.script.on["RunRollouts"] = stream
    async with aclosing(rollout_client.run_rollouts(REQUEST)) as events:
        assert await anext(events) == failure
        assert mesh.server.in_flight == 1
    await asyncio.wait_for(cancelled.wait(), 60.0)
    await until(lambda: mesh.server.in_flight == 0)


async def test_cancelling_the_task_cancels_the_call_at_the_server(mesh, rollout_client):
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def call(request, context):
        begun.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    mesh.script.on["GetRolloutStatus"] = call
    task = asyncio.create_task(rollout_client.get_status())
    await asyncio.wait_for(begun.wait(), 60.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(cancelled.wait(), 60.0)


async def test_calls_under_a_closed_client_fail_and_the_task_that_made_them_goes_on(mesh, trainer_client):
    running = asyncio.Semaphore(0)

    async def hangs(request, context):
        running.release()
        await asyncio.sleep(30)

    async def streams(request, context):
        await hangs(request, context)
        yield trainer_pb2.WatchStepsResponse()

    mesh.script.on |= {"GetTrainer": hangs, "WatchSteps": streams, "RunRollouts": streams}
    client = RolloutClient(mesh.address)
    calls = [
        asyncio.create_task(call)
        for call in (
            trainer_client.get_trainer(),
            anext(trainer_client.watch_steps("r")),
            anext(client.run_rollouts(dataclasses.replace(REQUEST, linger_s=30.0))),
        )
    ]
    for _ in calls:
        await running.acquire()
    await asyncio.gather(trainer_client.close(), client.close())
    for call in calls:
        with pytest.raises(MeshError, match="was closed") as seen:
            await asyncio.wait_for(call, 60.0)
        assert seen.value.reason is Reason.CANCELLED


async def test_the_callers_trace_context_is_current_in_the_servicer(mesh, rollout_client, answers):
    seen = {}

    async def call(request, context):
        seen["unary"] = current_traceparent()
        return answers["GetRolloutStatus"]

    async def stream(request, context):
        seen["stream"], seen["field"] = current_traceparent(), request.traceparent
        yield convert.rollout_event_to_proto(SUMMARY)

    mesh.script.on["GetRolloutStatus"], mesh.script.on["RunRollouts"] = call, stream
    token = otel_context.attach(context_from(TRACEPARENT))
    try:
        await rollout_client.get_status()
        assert [event async for event in rollout_client.run_rollouts(REQUEST)] == [SUMMARY]
    finally:
        otel_context.detach(token)
    assert seen == {"unary": TRACEPARENT, "stream": TRACEPARENT, "field": TRACEPARENT}


async def test_calls_leave_a_client_and_a_server_span_of_one_trace(make_mesh, answers):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    mesh = await make_mesh(tracer=tracer)
    seen = []

    async def call(request, context):
        seen.append(current_traceparent())
        raise MeshError(Reason.OVERLOADED)

    async def look(request, context):
        return answers["GetRolloutStatus"]

    mesh.script.on["CancelRollouts"], mesh.script.on["RunRollouts"] = call, summary_only
    async with RolloutClient(mesh.address, tracer=tracer) as client:
        with pytest.raises(MeshError):
            await client.cancel_rollouts()
        assert [event async for event in client.run_rollouts(REQUEST)] == [SUMMARY]
        mesh.script.on["GetRolloutStatus"] = look
        await client.get_status()
    await mesh.server.drain(1.0)
    spans = {(span.name.rsplit("/")[-1], span.kind.name): span for span in exporter.get_finished_spans()}
    client_span, server_span = spans["CancelRollouts", "CLIENT"], spans["CancelRollouts", "SERVER"]
    assert server_span.parent.span_id == client_span.context.span_id
    assert seen == [format_traceparent(server_span.context)]
    assert client_span.name == "meshrl.v1.RolloutService/CancelRollouts"
    assert client_span.attributes["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"
    assert client_span.attributes["error.type"] == "OVERLOADED"
    assert server_span.attributes["rpc.system.name"] == "grpc"
    assert spans["RunRollouts", "SERVER"].attributes["rpc.response.status_code"] == "OK"
    assert not [method for method, _ in spans if method.startswith("Get")], "looks are made every second"
    provider.shutdown()


async def test_a_watch_resumes_where_it_stopped_after_the_server_restarts(make_mesh):
    first = await make_mesh(port=free_port())  # which nobody takes while it is away
    asked = []

    def history(*revisions, endless):
        async def stream(request, context):
            asked.append(request.after_revision)
            for revision in revisions:
                yield trainer_pb2.WatchStepsResponse(revision=revision, step=1, state=trainer_pb2.STEP_STATE_QUEUED)
            if endless:
                await asyncio.sleep(30)

        return stream

    first.script.on["WatchSteps"] = history(1, 2, endless=True)
    revisions = []
    async with TrainerClient(first.address, ChannelOptions(reconnect_s=60.0)) as client:
        async for event in client.watch_steps():
            revisions.append(event.revision)
            if event.revision == 2:
                await first.server.drain(0.0)
                second = await make_mesh(port=first.port)
                second.script.on["WatchSteps"] = history(2, 3, endless=False)
    await second.server.drain(0.0)
    assert revisions == [1, 2, 3]
    assert asked == [0, 2]


async def test_a_watch_gives_up_after_the_time_to_reconnect(make_mesh):
    mesh = await make_mesh()

    async def stream(request, context):
        yield trainer_pb2.WatchStepsResponse(revision=1, step=1, state=trainer_pb2.STEP_STATE_QUEUED)
        await asyncio.sleep(30)

    mesh.script.on["WatchSteps"] = stream
    async with TrainerClient(mesh.address, ChannelOptions(reconnect_s=0.5)) as client:
        events = client.watch_steps()
        assert (await anext(events)).revision == 1
        await mesh.server.drain(0.0)
        with pytest.raises(MeshError) as seen:
            await asyncio.wait_for(anext(events), 60.0)
    assert seen.value.reason in (Reason.UNREACHABLE, Reason.DRAINING)


async def test_a_watch_passes_over_states_it_does_not_know_and_ends_with_the_server(mesh, trainer_client):
    async def stream(request, context):
        for revision, state in ((1, 99), (2, trainer_pb2.STEP_STATE_RUNNING)):
            yield trainer_pb2.WatchStepsResponse(revision=revision, step=1, state=state)

    mesh.script.on["WatchSteps"] = stream
    assert [event.revision async for event in trainer_client.watch_steps()] == [2]


async def test_a_watch_does_not_hide_an_answer(mesh, trainer_client):
    async def stream(request, context):
        raise MeshError(Reason.REVISION_EXPIRED, "history begins at revision 9")
        yield

    mesh.script.on["WatchSteps"] = stream
    with pytest.raises(MeshError, match="REVISION_EXPIRED"):
        await anext(trainer_client.watch_steps(after_revision=1))
    assert mesh.script.calls == ["WatchSteps"]


async def test_an_idle_stream_outlives_three_pings(make_mesh):
    mesh = await make_mesh(min_ping_interval_s=0.1)
    goes_on = asyncio.Event()

    async def stream(request, context):
        await goes_on.wait()
        yield trainer_pb2.WatchStepsResponse(revision=1, step=1, state=trainer_pb2.STEP_STATE_DONE)

    mesh.script.on["WatchSteps"] = stream
    options = ChannelOptions(keepalive_s=0.25, keepalive_timeout_s=60.0, reconnect_s=0.01)
    async with TrainerClient(mesh.address, options) as client:
        events = client.watch_steps()
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(1.1)
        assert not first.done()
        goes_on.set()
        assert (await asyncio.wait_for(first, 60.0)).revision == 1
    await mesh.server.drain(1.0)
    assert mesh.script.calls == ["WatchSteps"]


async def sleeping_stream(request, context):
    await asyncio.sleep(60)
    yield


async def test_a_call_that_a_drain_cuts_off_says_who_ended_it_and_why(make_mesh):
    mesh = await make_mesh()
    mesh.script.on["GetRolloutStatus"], mesh.script.on["WatchSteps"] = sleeping, sleeping_stream
    options = ChannelOptions(reconnect_s=0.01)
    async with RolloutClient(mesh.address, options) as client, TrainerClient(mesh.address, options) as watcher:
        calls = [asyncio.create_task(client.get_status()), asyncio.ensure_future(anext(watcher.watch_steps()))]
        await until(lambda: mesh.server.in_flight == 2)
        await mesh.server.drain(0.2)
        ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60.0)
    assert [str(end) for end in ends] == [
        f"DRAINING: the server ended meshrl.v1.{method}: it shuts down and has waited for 0.2 s"
        for method in ("RolloutService/GetRolloutStatus", "TrainerService/WatchSteps")
    ]


async def test_a_call_that_ends_at_its_deadline_names_itself_and_the_deadline(mesh):
    mesh.script.on["GetRolloutStatus"] = sleeping
    async with RolloutClient(mesh.address, ChannelOptions(unary_deadline_s=0.25)) as client:
        with pytest.raises(MeshError) as seen:
            await client.get_status()
    call = f"meshrl.v1.RolloutService/GetRolloutStatus of {mesh.address}"
    assert str(seen.value) == f"DEADLINE_PASSED: {call} was not answered within its deadline of 0.25 s"
