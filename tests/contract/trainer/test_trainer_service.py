"""TrainerService through a real channel: what conformance and the tests of bad input do not look at."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpc_servers import served
from meshrl.client import ChannelOptions, TrainerClient
from meshrl.client.credentials import CredentialFiles, TokenCredentials, credentials_of
from meshrl.client.trust import Role, Scope, TrustFile
from meshrl.core.rpc.guard import CALLER, Caller
from meshrl.trainer.runs.quotas import Quotas
from meshrl.trainer.runs.steps import StepBook
from meshrl.trainer.runs.table import RunTable
from meshrl.trainer.service import TrainerServicer
from meshrl.v1 import trainer_pb2 as pb
from meshrl.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from meshrl.wire.convert import batch_to_messages
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import StepState
from served_trainer import Mesh, batch, trainer_info


async def test_trainer_says_what_it_is(mesh: Mesh) -> None:
    info = await mesh.client.get_trainer()
    assert (info.world_size, info.dp_size, info.seq_len, info.objective, info.model) == (1, 1, 32, "aipo", "tiny")
    assert [(run.run_id, run.step, run.version, run.epoch) for run in info.runs] == [("main", 0, 0, 7)]
    assert await mesh.client.list_runs() == info.runs


async def test_submitted_batch_becomes_a_version(mesh: Mesh) -> None:
    assert await mesh.client.submit_batch(batch(1)) == 1
    event = await mesh.until(StepState.DONE, 1)
    assert (event.version, event.artifact_id) == (1, "artifact-1")
    assert event.metrics["optim/grad_norm"] > 0
    assert event.timings_s["step"] > 0
    assert event.entropies is not None
    assert event.entropies.mean() == pytest.approx(event.metrics["entropy/all/mean"], rel=1e-5)
    (run,) = await mesh.client.list_runs()
    assert (run.step, run.version, run.revision) == (1, 1, 3)


async def test_checkpoint_is_on_disk_when_the_call_returns(mesh: Mesh, tmp_path: Path) -> None:
    await mesh.client.submit_batch(batch(1))
    await mesh.until(StepState.DONE, 1)
    assert await mesh.client.save_checkpoint() == (1, str(tmp_path / "checkpoints" / "step_1" / "trainer"))
    assert any((tmp_path / "checkpoints" / "step_1" / "trainer").iterdir())
    assert (tmp_path / "weights" / "step_1" / "config.json").is_file()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda client: client.create_run("main"), Reason.RUN_EXISTS),
        (lambda client: client.create_run("other"), Reason.RUN_LIMIT_REACHED),
        (lambda client: client.save_checkpoint("other"), Reason.UNKNOWN_RUN),
        (lambda client: anext(client.watch_steps(after_revision=99)), Reason.REVISION_EXPIRED),
    ],
    ids=["create-own", "create", "save", "watch-future"],
)
async def test_what_a_run_does_not_allow_has_its_reason(mesh: Mesh, call: Any, reason: Reason) -> None:
    with pytest.raises(MeshError) as caught:
        await call(mesh.client)
    assert caught.value.reason is reason


async def test_drain_finishes_the_queue_refuses_more_and_ends_watches(mesh: Mesh) -> None:
    await mesh.client.submit_batch(batch(1))
    assert await mesh.client.drain() == 1
    assert mesh.drained.is_set()
    assert (await mesh.refused(batch(2))).reason is Reason.DRAINING
    mesh.queue.close()
    async with asyncio.timeout(60.0):
        states = [event.state async for event in mesh.client.watch_steps()]
    assert states == [StepState.QUEUED, StepState.RUNNING, StepState.DONE]


def counting(file: Path) -> TrainerServicer:
    """A service of the run main that trains nothing and counts what tenants send in a file."""
    info = trainer_info(dp_size=1, max_queued_batches=2)
    table = RunTable(StepBook(run_id="main", epoch=1))
    return TrainerServicer(table, info, on_drained=lambda: None, quotas=Quotas(file))


async def test_the_batches_of_a_token_are_counted_by_the_token_over_a_real_channel(tmp_path: Path) -> None:
    trust = TrustFile(tmp_path / "trust.sqlite")
    trust.create()
    quota = trust.add_token(Role.TENANT, runs=["main"], tokens_per_day=10)  # those of one batch
    free = trust.add_token(Role.TENANT, runs=["main"])
    other = trust.add_token(Role.TENANT, runs=["other-*"])
    credentials = credentials_of(CredentialFiles(trust=trust.path))
    servicer = counting(tmp_path / "quotas.json")

    async def send(token: str, step: int) -> int:
        async with TrainerClient(address, ChannelOptions(credentials=TokenCredentials(token))) as client:
            return await client.submit_batch(replace(batch(step), run_id="main"))

    async with served(
        "meshrl.v1.TrainerService", add_TrainerServiceServicer_to_server, servicer, credentials=credentials
    ) as address:
        assert await send(quota, 1) == 1
        with pytest.raises(MeshError, match=r"tenant/.* may train 10 tokens a day .* has trained 10 today") as refused:
            await send(quota, 2)
        assert refused.value.reason is Reason.OVERLOADED
        assert refused.value.retry_after_s is not None
        with pytest.raises(MeshError, match="may use the runs other-"):
            await send(other, 2)
        assert await send(free, 2) == 2
        assert json.loads((tmp_path / "quotas.json").read_text())["tokens"] == {quota.partition(".")[0]: 10}


async def test_a_batch_that_comes_twice_at_once_counts_once_for_its_tenant(tmp_path: Path) -> None:
    servicer, both = counting(tmp_path / "quotas.json"), asyncio.Barrier(2)

    async def upload(step: int, *, waits: bool) -> pb.SubmitBatchResponse:
        async def stream() -> AsyncIterator[pb.SubmitBatchRequest]:
            for number, message in enumerate(batch_to_messages(batch(step))):
                if waits and number == 1:
                    await both.wait()
                yield message

        return await servicer.SubmitBatch(stream(), None)

    scope = Scope(runs=("main",), tokens_per_day=10)  # those of one batch
    before = CALLER.set(Caller(role=Role.TENANT, name="x", account="t1", scope=scope))
    try:
        first, second = await asyncio.wait_for(asyncio.gather(upload(1, waits=True), upload(1, waits=True)), 20)
        assert first == second
        with pytest.raises(MeshError, match="has trained 10 today"):
            await upload(2, waits=False)
    finally:
        CALLER.reset(before)
