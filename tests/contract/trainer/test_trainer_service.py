"""TrainerService through a real channel: a real server, client, training thread and model."""

import asyncio
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshrl.v1 import trainer_pb2 as pb
from meshrl.v1 import trainer_pb2_grpc as pb_grpc
from meshrl.wire.errors import MeshError, Reason, from_rpc_error
from meshrl.wire.types import StepState
from served_trainer import VOCAB, Mesh, batch


async def test_trainer_says_what_it_is(mesh: Mesh) -> None:
    info = await mesh.client.get_trainer()
    assert (info.world_size, info.dp_size, info.seq_len, info.objective, info.model) == (1, 1, 32, "aipo", "tiny")
    assert [(run.run_id, run.step, run.version, run.epoch) for run in info.runs] == [("main", 0, 0, 7)]
    assert await mesh.client.list_runs() == info.runs


async def test_submitted_batch_becomes_a_version(mesh: Mesh) -> None:
    assert await mesh.client.submit_batch(batch(1)) == 1
    event = await mesh.until(StepState.DONE, 1)
    assert event.version == 1
    assert event.metrics["optim/grad_norm"] > 0
    assert event.timings_s["step"] > 0
    assert event.entropies is not None
    assert event.entropies.mean() == pytest.approx(event.metrics["entropy/all/mean"], rel=1e-5)
    (run,) = await mesh.client.list_runs()
    assert (run.step, run.version, run.revision) == (1, 1, 3)


async def test_watch_sends_history_then_live_and_resumes(mesh: Mesh) -> None:
    await mesh.client.submit_batch(batch(1))
    await mesh.until(StepState.DONE, 1)
    seen: list[tuple[int, StepState]] = []

    async def watch() -> None:
        async for event in mesh.client.watch_steps("main", after_revision=1):
            seen.append((event.step, event.state))
            if (event.step, event.state) == (2, StepState.DONE):
                return

    watching = asyncio.create_task(watch())
    await mesh.client.submit_batch(batch(2))
    await asyncio.wait_for(watching, 60.0)
    assert seen == [(1, StepState.RUNNING), (1, StepState.DONE)] + [
        (2, state) for state in (StepState.QUEUED, StepState.RUNNING, StepState.DONE)
    ]


async def test_same_batch_again_returns_the_first_revision(mesh: Mesh) -> None:
    assert await mesh.client.submit_batch(batch(1)) == 1
    await mesh.until(StepState.DONE, 1)
    assert await mesh.client.submit_batch(batch(1)) == 1
    (run,) = await mesh.client.list_runs()
    assert run.revision == 3


async def test_another_batch_for_a_known_step_conflicts(mesh: Mesh) -> None:
    await mesh.client.submit_batch(batch(1))
    assert (await mesh.refused(batch(1, token=9))).reason is Reason.BATCH_CONFLICT


async def test_step_out_of_order_names_the_next_one(mesh: Mesh) -> None:
    error = await mesh.refused(batch(3))
    assert error.reason is Reason.STEP_OUT_OF_ORDER
    assert "the next step of run 'main' is 1" in error.message


async def test_full_queue_tells_when_to_come_back(mesh: Mesh) -> None:
    mesh.gate.clear()
    await mesh.client.submit_batch(batch(1))
    await mesh.until(StepState.RUNNING, 1)
    await mesh.client.submit_batch(batch(2))
    error = await mesh.refused(batch(3))
    assert error.reason is Reason.OVERLOADED
    assert error.retry_after_s == pytest.approx(0.5)
    mesh.gate.set()
    await mesh.until(StepState.DONE, 2)


async def test_bad_batch_is_refused_with_every_field(mesh: Mesh) -> None:
    (row,) = batch(1).micro_batches
    bad = replace(row, temperatures=np.zeros(2, np.float32), token_ids=np.full(10, VOCAB, np.int32))
    error = await mesh.refused(replace(batch(1), micro_batches=(bad,)))
    assert error.reason is Reason.INVALID_REQUEST
    fields = {violation.field for violation in error.violations}
    assert fields == {"micro_batches[0].temperatures", "micro_batches[0].token_ids"}
    assert (await mesh.client.get_trainer()).runs[0].revision == 0


async def test_failed_step_is_an_event_and_may_be_submitted_anew(mesh: Mesh) -> None:
    await mesh.client.submit_batch(batch(1, advantage=1e30))
    event = await mesh.until(StepState.FAILED, 1)
    assert event.reason == "STEP_FAILED"
    assert (await mesh.client.get_trainer()).runs[0].version == 0
    await mesh.client.submit_batch(batch(1))
    assert (await mesh.until(StepState.DONE, 1)).version == 1


async def test_checkpoint_is_on_disk_when_the_call_returns(mesh: Mesh, tmp_path: Path) -> None:
    await mesh.client.submit_batch(batch(1))
    await mesh.until(StepState.DONE, 1)
    assert await mesh.client.save_checkpoint() == (1, str(tmp_path / "checkpoints" / "step_1" / "trainer"))
    assert any((tmp_path / "checkpoints" / "step_1" / "trainer").iterdir())
    assert (tmp_path / "weights" / "step_1" / "config.json").is_file()


async def test_request_id_of_a_checkpoint_is_not_reused_for_another(mesh: Mesh) -> None:
    request_id = str(uuid.uuid4())
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        stub = pb_grpc.TrainerServiceStub(channel)  # type: ignore[no-untyped-call] # generated
        first = await stub.SaveCheckpoint(pb.SaveCheckpointRequest(request_id=request_id, weights_only=True))
        again = await stub.SaveCheckpoint(pb.SaveCheckpointRequest(request_id=request_id, weights_only=True))
        assert first == again
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SaveCheckpoint(pb.SaveCheckpointRequest(request_id=request_id))
    assert from_rpc_error(caught.value).reason is Reason.DUPLICATE_REQUEST


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda client: client.create_run("main"), Reason.RUN_EXISTS),
        (lambda client: client.create_run("other"), Reason.RUN_LIMIT_REACHED),
        (lambda client: client.delete_run("main"), Reason.RUN_PROTECTED),
        (lambda client: client.delete_run("other"), Reason.UNKNOWN_RUN),
        (lambda client: client.save_checkpoint("other"), Reason.UNKNOWN_RUN),
        (lambda client: client.submit_batch(batch(1, run_id="other")), Reason.UNKNOWN_RUN),
        (lambda client: anext(client.watch_steps("other")), Reason.UNKNOWN_RUN),
        (lambda client: anext(client.watch_steps(after_revision=99)), Reason.REVISION_EXPIRED),
    ],
    ids=["create-own", "create", "delete-own", "delete", "save", "submit", "watch", "watch-future"],
)
async def test_what_a_run_does_not_allow_has_its_reason(mesh: Mesh, call: Any, reason: Reason) -> None:
    with pytest.raises(MeshError) as caught:
        await call(mesh.client)
    assert caught.value.reason is reason


async def test_peer_of_another_contract_is_refused(mesh: Mesh) -> None:
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        stub = pb_grpc.TrainerServiceStub(channel)  # type: ignore[no-untyped-call] # generated
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTrainer(pb.GetTrainerRequest(contract_version="99.0"))
    assert from_rpc_error(caught.value).reason is Reason.CONTRACT_MISMATCH


async def test_drain_finishes_the_queue_refuses_more_and_ends_watches(mesh: Mesh) -> None:
    await mesh.client.submit_batch(batch(1))
    assert await mesh.client.drain() == 1
    assert mesh.drained.is_set()
    assert (await mesh.refused(batch(2))).reason is Reason.DRAINING
    mesh.queue.close()
    async with asyncio.timeout(60.0):
        states = [event.state async for event in mesh.client.watch_steps()]
    assert states == [StepState.QUEUED, StepState.RUNNING, StepState.DONE]


async def test_health_answers_for_the_service(mesh: Mesh) -> None:
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        request = health_pb2.HealthCheckRequest(service="meshrl.v1.TrainerService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request)  # type: ignore[no-untyped-call] # generated
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
