"""A stream of RunRollouts that broke is attached to again: what did not arrive comes, and nothing is played twice."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest

from cut_link import CutLink
from meshrl.client import RolloutClient
from meshrl.rollout.runner import serialized
from meshrl.rollout.streams import ResumableStreams
from meshrl.v1 import rollout_pb2, rollout_pb2_grpc
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason, from_rpc_error
from meshrl.wire.types import Rollout, RolloutFailure, RolloutSummary
from polling import until


def held(engine) -> asyncio.Event:
    """All calls but the first of an engine wait for the event."""
    gate, first = asyncio.Event(), []

    async def slow(request, body):
        first.append(body)
        if len(first) > 1:
            await gate.wait()

    engine.on_call = slow
    return gate


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_group_goes_on_over_a_cut_and_each_rollout_comes_once(start_mesh, engine, make_group, workers):
    gate = held(engine)
    mesh = await start_mesh([engine], workers=workers)
    events = []
    with CutLink(mesh.client.address) as link:
        async with RolloutClient(link.address) as client:
            await client.list_environments()
            async with aclosing(client.run_rollouts(make_group(group_size=3, deadline_s=60.0, linger_s=30.0))) as got:
                async for event in got:
                    events.append(event)
                    if len(events) == 1:
                        await asyncio.to_thread(link.cut)
                        gate.set()
                        await until(lambda: mesh.runner.status().finished == 3)
                        link.mend()
    assert [type(event) for event in events] == [Rollout, Rollout, Rollout, RolloutSummary]
    assert len({event.rollout_id for event in events[:3]}) == 3
    assert len(engine.requests) == 3
    assert events[-1] == RolloutSummary(finished=3, failed=0, cancelled=0, sampled_tokens=12)


async def test_without_linger_a_group_ends_with_its_stream_as_in_contract_1_0(start_mesh, engine, make_group):
    held(engine)
    mesh = await start_mesh([engine])
    with CutLink(mesh.client.address) as link:
        async with RolloutClient(link.address) as client:
            await client.list_environments()
            events = client.run_rollouts(make_group(group_size=2, deadline_s=60.0))
            await anext(events)
            await asyncio.to_thread(link.cut)
            with pytest.raises(MeshError) as broken:
                await anext(events)
    assert broken.value.reason is Reason.UNREACHABLE
    await until(lambda: mesh.runner.status().running == 0)


async def test_closing_the_iterator_ends_a_group_that_would_go_on(start_mesh, engine, make_group):
    held(engine)
    mesh = await start_mesh([engine])
    async with aclosing(mesh.client.run_rollouts(make_group(group_size=3, deadline_s=60.0, linger_s=50.0))) as events:
        async for _ in events:
            break
    await until(lambda: mesh.runner.status().running == 0)


async def test_a_group_that_nobody_attaches_to_ends_after_its_linger(start_mesh, engine, make_group):
    held(engine)
    mesh = await start_mesh([engine])
    async with grpc.aio.insecure_channel(mesh.client.address) as channel:
        call = stream_of(channel, make_group(group_size=3, deadline_s=60.0, linger_s=0.3))
        await call.read()
        call.cancel()
        assert mesh.runner.status().running == 2
        await until(lambda: mesh.runner.status().running == 0)


async def test_another_call_takes_the_stream_over(start_mesh, engine, make_group):
    gate = held(engine)
    mesh = await start_mesh([engine])
    request = make_group(group_size=2, deadline_s=60.0, linger_s=30.0)
    async with grpc.aio.insecure_channel(mesh.client.address) as channel:
        first = stream_of(channel, request)
        assert (await first.read()).seq == 1
        second = stream_of(channel, request, after_seq=1)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await first.read()
        assert from_rpc_error(ended.value, call="RunRollouts").reason is Reason.CANCELLED
        gate.set()
        assert [message.seq async for message in second] == [2, 3]


async def test_what_was_acknowledged_is_gone_and_is_named_so(start_mesh, engine, make_group):
    mesh = await start_mesh([engine])
    request = make_group(group_size=2, linger_s=30.0)
    async with grpc.aio.insecure_channel(mesh.client.address) as channel:
        whole = [message async for message in stream_of(channel, request)]
        again = [message async for message in stream_of(channel, request, after_seq=0)]
        assert again == whole
        assert [message.seq async for message in stream_of(channel, request, after_seq=2)] == [3]
        refusals = {0: Reason.REVISION_EXPIRED, 9: Reason.REVISION_EXPIRED, None: Reason.DUPLICATE_REQUEST}
        for refused, reason in refusals.items():
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stream_of(channel, request, after_seq=refused).read()
            assert from_rpc_error(error.value, call="RunRollouts").reason is reason
        other = convert.to_proto(request)
        other.group_size, other.after_seq = 3, 3
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rollout_pb2_grpc.RolloutServiceStub(channel).RunRollouts(other, timeout=60.0).read()
        assert from_rpc_error(error.value, call="RunRollouts").reason is Reason.DUPLICATE_REQUEST


async def test_a_new_request_for_a_group_without_a_stream_takes_its_place(start_mesh, engine, make_group):
    gate = held(engine)
    mesh = await start_mesh([engine])
    request = make_group(group_id="g", group_size=2, deadline_s=60.0, linger_s=30.0)
    async with grpc.aio.insecure_channel(mesh.client.address) as channel:
        call = stream_of(channel, request)
        await call.read()
        call.cancel()
        (stream,) = mesh.servicer._streams._streams.values()
        await until(lambda: stream.reader is None)
        gate.set()
        rest = make_group(group_id="g", group_size=1, deadline_s=60.0)
        assert [type(event) async for event in mesh.client.run_rollouts(rest)] == [Rollout, RolloutSummary]


async def test_kept_bytes_have_a_bound_and_what_nobody_has_read_stays(make_group):
    request = make_group(group_size=8, linger_s=30.0)
    failure = RolloutFailure(rollout_id="r", group_id="g", reason="INTERNAL", message="x" * 1000, retryable=False)

    async def run(asked, emit):
        for message in serialized(*[failure] * 8, RolloutSummary(finished=0, failed=8, cancelled=0, sampled_tokens=0)):
            emit(message)

    streams = ResumableStreams(run, most_bytes=3000)
    messages = [message async for message in streams.follow(request)]
    assert [number(message) for message in messages] == list(range(1, 10))
    with pytest.raises(MeshError, match="keeps events") as gone:
        _ = [message async for message in streams.follow(replace(request, after_seq=0))]
    assert gone.value.reason is Reason.REVISION_EXPIRED
    first = int(gone.value.message.partition("keeps events ")[2].split()[0])
    assert first > 5
    late = [number(message) async for message in streams.follow(replace(request, after_seq=first - 1))]
    assert late == list(range(first, 10))


def number(message: bytes) -> int:
    return rollout_pb2.RunRolloutsResponse.FromString(message).seq


def stream_of(channel, request, *, after_seq=None):
    message = convert.to_proto(request)
    if after_seq is not None:
        message.after_seq = after_seq
    return rollout_pb2_grpc.RolloutServiceStub(channel).RunRollouts(message, timeout=60.0)
