"""TrainerService over gRPC: converts each request, asks the run it names, converts the answer back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.trainer.answers import Answers
from meshrl.trainer.validate import check_batch
from meshrl.trainer.work_queue import TrainingQueue
from meshrl.v1 import trainer_pb2 as pb
from meshrl.v1 import trainer_pb2_grpc as pb_grpc
from meshrl.wire import validate
from meshrl.wire.convert.batches import BatchReader, run_to_proto, step_event_to_proto, trainer_info_to_proto
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import CONTRACT_VERSION, RunInfo, TrainerInfo

MIN_MESSAGE_BYTES = 4 * 2**20
BYTES_PER_TOKEN = 64  # of a micro-batch message, with room for the ids and traces of its samples


@dataclass(frozen=True, kw_only=True)
class TrainerFacts:
    """What does not change while a trainer lives."""

    world_size: int
    dp_size: int
    seq_len: int
    vocab_size: int
    objective: str
    model: str
    max_queued_batches: int
    max_concurrent_runs: int

    @property
    def max_message_bytes(self) -> int:
        """Of a message to or from the trainer: a micro-batch of `seq_len` tokens fits."""
        return max(MIN_MESSAGE_BYTES, self.seq_len * BYTES_PER_TOKEN)


class TrainerServicer(pb_grpc.TrainerServiceServicer):
    """The thin servicer. `on_drained` is called once a client's Drain has emptied the queue."""

    def __init__(self, queue: TrainingQueue, facts: TrainerFacts, *, on_drained: Callable[[], None]) -> None:
        self._queue = queue
        self._facts = facts
        self._on_drained = on_drained
        self._saves: Answers[tuple[int, Path]] = Answers()

    async def GetTrainer(self, request: pb.GetTrainerRequest, context: Any) -> pb.GetTrainerResponse:  # noqa: N802 - gRPC's name
        validate.validate_contract_version(request.contract_version)
        facts = self._facts
        info = TrainerInfo(
            world_size=facts.world_size,
            dp_size=facts.dp_size,
            seq_len=facts.seq_len,
            pad_multiple=1,
            objective=facts.objective,
            model=facts.model,
            runs=(self._queue.book.info(),),
            max_queued_batches=facts.max_queued_batches,
            vocab_size=facts.vocab_size,
            max_message_bytes=facts.max_message_bytes,
        )
        return trainer_info_to_proto(info, contract_version=CONTRACT_VERSION)

    async def SubmitBatch(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[pb.SubmitBatchRequest], context: Any
    ) -> pb.SubmitBatchResponse:
        reader = BatchReader(seq_len=self._facts.seq_len, dp_size=self._facts.dp_size)
        async for message in request_iterator:
            first = reader.header is None
            reader.feed(message)
            if first and reader.header is not None:
                self._own_run(reader.header.run_id)
                answer = self._queue.book.admit(reader.header.step, reader.header.digest)
                if answer is not None:  # a repetition need not send its tensors again
                    return pb.SubmitBatchResponse(revision=answer.revision, queue_position=answer.queue_position)
        batch = await asyncio.to_thread(reader.finish)
        await asyncio.to_thread(check_batch, batch, vocab_size=self._facts.vocab_size)
        assert reader.header is not None  # finish raises without one
        answer = self._queue.submit(batch, reader.header.digest)
        return pb.SubmitBatchResponse(revision=answer.revision, queue_position=answer.queue_position)

    async def WatchSteps(  # noqa: N802 - gRPC's name
        self, request: pb.WatchStepsRequest, context: Any
    ) -> AsyncIterator[pb.WatchStepsResponse]:
        self._own_run(request.run_id)
        async for event in self._queue.watch(request.after_revision):
            yield step_event_to_proto(event)

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Any) -> pb.SaveCheckpointResponse:  # noqa: N802 - gRPC's name
        validate.validate_checkpoint_request(request)
        self._own_run(request.run_id)
        step, path = await self._saves.once(
            request.request_id,
            request.SerializeToString(deterministic=True),
            lambda: self._queue.save_checkpoint(weights_only=request.weights_only),
        )
        return pb.SaveCheckpointResponse(step=step, path=str(path))

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.CreateRunResponse:  # noqa: N802 - gRPC's name
        validate.validate_run_request(request)
        own = self._queue.book.info()
        if request.run_id == own.run_id:
            raise MeshError(Reason.RUN_EXISTS, f"run {own.run_id!r} is this trainer's own; choose another run_id")
        raise MeshError(
            Reason.RUN_LIMIT_REACHED,
            f"this trainer holds {self._facts.max_concurrent_runs} run(s), its own {own.run_id!r} included, and takes "
            "no more; start another trainer",
        )

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:  # noqa: N802 - gRPC's name
        return pb.ListRunsResponse(runs=[run_to_proto(self._queue.book.info())])

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Any) -> pb.DeleteRunResponse:  # noqa: N802 - gRPC's name
        validate.validate_run_request(request)
        own = self._own_run(request.run_id)
        raise MeshError(Reason.RUN_PROTECTED, f"run {own.run_id!r} is this trainer's own; use Drain to end it")

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:  # noqa: N802 - gRPC's name
        step = await self._queue.drain()
        self._on_drained()
        return pb.DrainResponse(step=step)

    def _own_run(self, run_id: str) -> RunInfo:
        """The trainer's own run, which an empty id means. Raises UNKNOWN_RUN for any other."""
        own = self._queue.book.info()
        if run_id not in ("", own.run_id):
            raise MeshError(Reason.UNKNOWN_RUN, f"no run {run_id!r} here; this trainer holds {own.run_id!r}")
        return own
