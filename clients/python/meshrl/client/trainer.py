"""Client of TrainerService: submits batches and follows their steps."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator

from opentelemetry.trace import Tracer

from meshrl.client.channel import ChannelOptions, ServiceClient
from meshrl.v1 import trainer_pb2 as pb
from meshrl.v1 import trainer_pb2_grpc
from meshrl.wire import convert
from meshrl.wire.types import CONTRACT_VERSION, Batch, RunInfo, RunSpec, StepEvent, TrainerInfo
from meshrl.wire.validate import validate_contract_version


class TrainerClient(ServiceClient):
    """Failed calls raise MeshError alone."""

    service = "meshrl.v1.TrainerService"
    server_role = "publisher"
    idempotent_methods = (
        "GetTrainer", "SaveCheckpoint", "CreateRun", "ListRuns", "DeleteRun", "Drain",
        "GetRun", "SuspendRun", "ResumeRun",
    )  # fmt: skip

    def __init__(self, address: str, options: ChannelOptions | None = None, *, tracer: Tracer | None = None) -> None:
        super().__init__(address, options, tracer=tracer)
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    async def get_trainer(self) -> TrainerInfo:
        """Raises CONTRACT_MISMATCH for another major version."""
        request = pb.GetTrainerRequest(contract_version=CONTRACT_VERSION)
        response = await self._unary(self._stub.GetTrainer, "GetTrainer", request)
        validate_contract_version(response.contract_version)
        return convert.from_proto(TrainerInfo, response)

    async def submit_batch(self, batch: Batch) -> int:
        """Returns the revision of the batch's QUEUED event. Submitting a batch again is harmless."""

        async def upload() -> AsyncGenerator[pb.SubmitBatchRequest, None]:
            for message in convert.batch_to_messages(batch):
                yield message

        deadline_s = self.options.upload_deadline_s
        response = await self._upload(self._stub.SubmitBatch, "SubmitBatch", upload(), deadline_s)
        return int(response.revision)

    def watch_steps(self, run_id: str = "", after_revision: int = 0) -> AsyncGenerator[StepEvent, None]:
        """A run's events after a revision, history first, then live, until the trainer drains.

        Reconnects for up to `reconnect_s`, then raises UNREACHABLE. Raises REVISION_EXPIRED when the history begins
        later.
        """
        return self._watch(
            self._stub.WatchSteps,
            "WatchSteps",
            lambda revision: pb.WatchStepsRequest(run_id=run_id, after_revision=revision),
            after_revision,
            convert.step_event_from_proto,
        )

    async def save_checkpoint(self, run_id: str = "", weights_only: bool = False) -> tuple[int, str]:
        """Returns (step, path on the trainer's file system) once it is durable."""
        request = pb.SaveCheckpointRequest(request_id=str(uuid.uuid4()), run_id=run_id, weights_only=weights_only)
        deadline_s = self.options.checkpoint_deadline_s
        response = await self._unary(self._stub.SaveCheckpoint, "SaveCheckpoint", request, deadline_s)
        return int(response.step), str(response.path)

    async def create_run(self, run_id: str, spec: RunSpec | None = None) -> RunInfo:
        """Without a spec it is trained as the trainer's own run."""
        request = pb.CreateRunRequest(request_id=str(uuid.uuid4()), run_id=run_id)
        if spec is not None:
            request.spec.CopyFrom(convert.to_proto(spec))
        response = await self._unary(self._stub.CreateRun, "CreateRun", request, self.options.checkpoint_deadline_s)
        return convert.from_proto(RunInfo, response.run)

    async def get_run(self, run_id: str = "") -> RunInfo:
        """An empty id is the trainer's own."""
        response = await self._unary(self._stub.GetRun, "GetRun", pb.GetRunRequest(run_id=run_id))
        return convert.from_proto(RunInfo, response.run)

    async def suspend_run(self, run_id: str, message: str = "") -> RunInfo:
        """The trainer takes no batches of the run until `resume_run`."""
        request = pb.SuspendRunRequest(request_id=str(uuid.uuid4()), run_id=run_id, message=message)
        response = await self._unary(self._stub.SuspendRun, "SuspendRun", request)
        return convert.from_proto(RunInfo, response.run)

    async def resume_run(self, run_id: str) -> RunInfo:
        request = pb.ResumeRunRequest(request_id=str(uuid.uuid4()), run_id=run_id)
        response = await self._unary(self._stub.ResumeRun, "ResumeRun", request, self.options.checkpoint_deadline_s)
        return convert.from_proto(RunInfo, response.run)

    async def list_runs(self) -> tuple[RunInfo, ...]:
        """In order of creation."""
        response = await self._unary(self._stub.ListRuns, "ListRuns", pb.ListRunsRequest())
        return tuple(convert.from_proto(RunInfo, run) for run in response.runs)

    async def delete_run(self, run_id: str, *, keep_checkpoints: bool = False) -> None:
        """Removes a run that `create_run` added."""
        request = pb.DeleteRunRequest(request_id=str(uuid.uuid4()), run_id=run_id, keep_checkpoints=keep_checkpoints)
        await self._unary(self._stub.DeleteRun, "DeleteRun", request, self.options.checkpoint_deadline_s)

    async def drain(self, deadline_s: float | None = None) -> int:
        """The trainer finishes its queue and ends. Returns its last finished step."""
        limit_s = self.options.checkpoint_deadline_s if deadline_s is None else deadline_s
        response = await self._unary(self._stub.Drain, "Drain", pb.DrainRequest(), limit_s)
        return int(response.step)
