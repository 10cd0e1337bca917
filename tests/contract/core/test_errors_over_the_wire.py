"""What a servicer raises is what the client sees, for every reason and every kind of call."""

import dataclasses
from contextlib import aclosing

import numpy as np
import pytest

from meshrl.client import ChannelOptions, RolloutClient
from meshrl.v1 import rollout_pb2
from meshrl.wire import convert
from meshrl.wire.errors import FieldViolation, MeshError, Reason
from meshrl.wire.types import Batch, MicroBatch, RolloutFailure, RolloutRequest, RolloutSummary

REQUEST = RolloutRequest(
    request_id="2f1c59a4-0b6e-4c5e-9c3e-7b1f6d2a8e10",
    group_id="g",
    environment="e",
    task_index=0,
    group_size=1,
    deadline_s=60.0,
)
SUMMARY = RolloutSummary(finished=0, failed=0, cancelled=0, sampled_tokens=0)


def raising(error):
    async def call(request, context):
        raise error

    return call


def yielding(*events, error=None):
    async def stream(request, context):
        for event in events:
            yield convert.rollout_event_to_proto(event)
        if error is not None:
            raise error

    return stream


async def collect(stream):
    async with aclosing(stream):
        return [event async for event in stream]


async def test_every_reason_crosses_a_unary_call(mesh, rollout_client):
    options = dataclasses.replace(rollout_client.options, retry_attempts=2)
    async with RolloutClient(mesh.address, options) as client:
        for reason in Reason:
            error = MeshError(reason, "why it failed", retry_after_s=1.5, metadata={"k": "v"})
            mesh.script.on["GetRolloutStatus"] = raising(error)
            with pytest.raises(MeshError) as seen:
                await client.get_status()
            assert (seen.value.reason, seen.value.message) == (reason, "why it failed")
            assert (seen.value.retry_after_s, seen.value.metadata) == (1.5, {"k": "v"})


async def test_violations_cross_a_stream_before_its_first_message(mesh, rollout_client):
    violations = (FieldViolation("group_size", "must be at least 1"), FieldViolation("deadline_s", "must be positive"))
    mesh.script.on["RunRollouts"] = yielding(error=MeshError(Reason.INVALID_REQUEST, violations=violations))
    with pytest.raises(MeshError) as seen:
        await collect(rollout_client.run_rollouts(REQUEST))
    assert seen.value.violations == violations


async def test_what_came_before_an_error_in_a_stream_is_kept(mesh, rollout_client):
    failure = RolloutFailure(rollout_id="o", group_id="g", reason="ENGINE_FAILED", message="m", retryable=True)
    mesh.script.on["RunRollouts"] = yielding(failure, error=MeshError(Reason.DRAINING))
    seen = []
    with pytest.raises(MeshError) as error:  # noqa: PT012  # what arrived before the error is what is tested
        async for event in rollout_client.run_rollouts(REQUEST):
            seen.append(event)  # noqa: PERF401  # the same
    assert seen == [failure]
    assert error.value.reason is Reason.DRAINING


async def test_an_upload_is_refused_while_it_is_sent(mesh, trainer_client):
    micro_batch = MicroBatch(
        dp_rank=0,
        token_ids=np.zeros(100_000, dtype=np.int32),
        position_ids=np.arange(100_000, dtype=np.int32),
        loss_mask=np.ones(100_000, dtype=np.bool_),
        advantages=np.zeros(100_000, dtype=np.float32),
        inference_logprobs=np.zeros(100_000, dtype=np.float32),
        sample_offsets=np.array([0, 100_000], dtype=np.int64),
        temperatures=np.ones(1, dtype=np.float32),
        env_index=np.zeros(1, dtype=np.int32),
        rollout_ids=("a",),
    )
    batch = Batch(run_id="r", step=1, micro_batches=(micro_batch,) * 20, loss_tokens=2_000_000, environments=("e",))
    mesh.script.on["SubmitBatch"] = raising(MeshError(Reason.STEP_OUT_OF_ORDER, "step 1 is done; submit step 2"))
    with pytest.raises(MeshError, match="STEP_OUT_OF_ORDER: step 1 is done; submit step 2"):
        await trainer_client.submit_batch(batch)


async def test_an_unexpected_exception_is_internal_and_named(mesh, rollout_client):
    mesh.script.on["GetRolloutStatus"] = raising(ZeroDivisionError("oops"))
    with pytest.raises(MeshError) as seen:
        await rollout_client.get_status()
    assert seen.value.reason is Reason.INTERNAL
    assert seen.value.message == "meshrl.v1.RolloutService/GetRolloutStatus failed: ZeroDivisionError: oops"


async def test_an_error_with_very_long_texts_still_arrives(mesh, rollout_client):
    error = MeshError(Reason.INVALID_REQUEST, "é" * 50_000, violations=[FieldViolation("f" * 900, "é" * 900)] * 100)
    mesh.script.on["GetRolloutStatus"] = raising(error)
    with pytest.raises(MeshError) as seen:
        await rollout_client.get_status()
    assert seen.value.reason is Reason.INVALID_REQUEST
    assert len(seen.value.violations) == 21


async def test_a_call_that_the_server_does_not_offer_is_not_supported(make_mesh):
    mesh = await make_mesh()
    mesh.script.on["GetRolloutStatus"] = raising(NotImplementedError())
    async with RolloutClient(mesh.address) as client:
        with pytest.raises(MeshError) as seen:
            await client.cancel_rollouts()
    await mesh.server.drain(0.0)
    assert seen.value.reason is Reason.NOT_SUPPORTED


async def test_nobody_at_the_address_is_unreachable():
    async with RolloutClient("127.0.0.1:1", ChannelOptions(retry_backoff_s=0.01)) as client:
        with pytest.raises(MeshError) as seen:
            await client.get_status()
    assert seen.value.reason is Reason.UNREACHABLE
    assert seen.value.__notes__ == ["in meshrl.v1.RolloutService/GetRolloutStatus of 127.0.0.1:1"]


async def test_a_message_larger_than_the_limit_is_named(mesh, rollout_client):
    async def big(request, context):
        return rollout_pb2.GetRolloutStatusResponse(engines=[rollout_pb2.EngineEndpoint(url="x" * 200_000)])

    mesh.script.on["GetRolloutStatus"] = big
    async with RolloutClient(mesh.address, ChannelOptions(max_message_bytes=100_000)) as client:
        with pytest.raises(MeshError) as seen:
            await client.get_status()
    assert seen.value.reason is Reason.MESSAGE_TOO_LARGE


async def test_a_peer_of_another_major_contract_is_refused(mesh, rollout_client):
    async def answer(request, context):
        assert request.contract_version == "1.1"
        return rollout_pb2.ListEnvironmentsResponse(contract_version="2.0")

    mesh.script.on["ListEnvironments"] = answer
    with pytest.raises(MeshError, match=r"CONTRACT_MISMATCH: the peer speaks contract 2\.0"):
        await rollout_client.list_environments()


async def test_a_stream_without_its_summary_is_broken(mesh, rollout_client):
    mesh.script.on["RunRollouts"] = yielding()
    with pytest.raises(MeshError, match="ended before its summary"):
        await collect(rollout_client.run_rollouts(REQUEST))


async def test_events_of_an_unknown_kind_are_passed_over(mesh, rollout_client):
    async def stream(request, context):
        yield rollout_pb2.RunRolloutsResponse()
        yield convert.rollout_event_to_proto(SUMMARY)

    mesh.script.on["RunRollouts"] = stream
    assert await collect(rollout_client.run_rollouts(REQUEST)) == [SUMMARY]
