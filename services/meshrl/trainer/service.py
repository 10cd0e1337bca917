"""TrainerService over gRPC: each request goes to the run that it names.

A batch is checked against the model before it is queued.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace

import numpy as np
from loguru import logger

from meshrl.core.rpc.guard import CALLER
from meshrl.core.rpc.paging import page_of
from meshrl.core.rpc.watches import with_bookmarks
from meshrl.trainer.runs.checkpoint_list import CheckpointList, key_of
from meshrl.trainer.runs.host import RunHost
from meshrl.trainer.runs.quotas import Quotas
from meshrl.trainer.runs.steps import TrainingQueue
from meshrl.trainer.runs.table import RunTable
from meshrl.v1 import trainer_pb2 as pb
from meshrl.v1 import trainer_pb2_grpc as pb_grpc
from meshrl.wire.convert import BatchReader, from_proto, to_proto
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.repeated_requests import FirstAnswers
from meshrl.wire.trainable import are_logprobs, bytes_per_token, routes_problem, row_problems
from meshrl.wire.types import (
    CONTRACT_VERSION,
    Batch,
    Checkpoint,
    MicroBatch,
    RoutedShape,
    RunInfo,
    RunSpec,
    TrainerInfo,
    capabilities,
)

MIN_MESSAGE_BYTES = 4 * 2**20
BYTES_PER_TOKEN = 64  # of a micro-batch message, with room for the ids and traces of its samples


def max_message_bytes(seq_len: int, replayed: RoutedShape | None) -> int:
    """A micro-batch of `seq_len` tokens fits, with their routes."""
    routes = 0 if replayed is None else bytes_per_token(replayed)
    return max(MIN_MESSAGE_BYTES, seq_len * (BYTES_PER_TOKEN + routes))


class TrainerServicer(pb_grpc.TrainerServiceServicer):
    """`host` adds and deletes runs. A trainer has its own run only until it is set."""

    def __init__(
        self,
        runs: RunTable,
        info: TrainerInfo,
        *,
        takes_prefixes: bool = False,
        on_drained: Callable[[], None],
        quotas: Quotas | None = None,
    ) -> None:
        """`info` is the answer of GetTrainer without the runs and the bytes of adapters. `takes_prefixes`: the model
        can train shared prefixes. `on_drained` is called once a client's Drain has emptied all queues."""
        self._runs = runs
        self._trainer, self._takes_prefixes = info, takes_prefixes
        self._on_drained = on_drained
        self.host: RunHost | None = None
        self._quotas = quotas
        self._changes: FirstAnswers[RunInfo | None] = FirstAnswers()
        self._saves: FirstAnswers[Checkpoint] = FirstAnswers()
        self._saving: set[asyncio.Task[Checkpoint]] = set()
        self._checkpoints: dict[str, CheckpointList] = {}  # by run
        self._told_unreplayed = False

    async def GetTrainer(self, request: pb.GetTrainerRequest, context: object) -> pb.GetTrainerResponse:  # noqa: N802 - gRPC's name
        info = replace(self._trainer, runs=tuple(self._info(run) for run in self._runs))
        if self.host is not None:
            info = replace(info, adapter_bytes_total=self.host.room_bytes, adapter_bytes_used=self.host.used_bytes)
        answer: pb.GetTrainerResponse = to_proto(
            info, contract_version=CONTRACT_VERSION, capabilities=capabilities.TRAINER
        )
        return answer

    async def SubmitBatch(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[pb.SubmitBatchRequest], context: object
    ) -> pb.SubmitBatchResponse:
        reader = BatchReader(seq_len=self._trainer.seq_len, dp_size=self._trainer.dp_size)
        run: TrainingQueue | None = None
        async for message in request_iterator:
            reader.feed(message)
            if run is None and reader.header is not None:
                run = self._runs.find(reader.header.run_id)
                answer = run.book.admit(reader.header.step, reader.header.digest)
                if answer is not None:  # a repetition need not send its tensors again
                    return pb.SubmitBatchResponse(revision=answer.revision, queue_position=answer.queue_position)
        batch, routed = await asyncio.to_thread(reader.finish), self._trainer.router_replay
        if routed is None:  # which no client was asked to send
            batch = batch.without_routes()
        await asyncio.to_thread(
            check_batch,
            batch,
            vocab_size=self._trainer.vocab_size,
            takes_prefixes=self._takes_prefixes,
            routed=routed,
        )
        assert reader.header is not None  # finish raises without one
        assert run is not None  # found by the header
        tokens = sum(len(row.token_ids) + row.shared_tokens for row in batch.micro_batches)
        known = run.book.admit(batch.step, reader.header.digest)  # it may have come by another call meanwhile
        quotas = self._quotas if known is None else None
        if quotas is not None:
            quotas.check(tokens)
        answer = run.submit(batch, reader.header.digest)
        if quotas is not None:
            await quotas.charge(tokens)
        self._tell_unreplayed(batch)
        return pb.SubmitBatchResponse(revision=answer.revision, queue_position=answer.queue_position)

    def _tell_unreplayed(self, batch: Batch) -> None:
        without = sum(row.routed_experts is None for row in batch.micro_batches)
        if self._trainer.router_replay is not None and without and not self._told_unreplayed:
            self._told_unreplayed = True
            logger.warning(
                "step {}: {} of {} rows carry no routes of experts and train without router replay; rollouts from"
                " before a restart have none, since the ledger keeps none, and engines report them with"
                " inference.enable_return_routed_experts",
                batch.step, without, len(batch.micro_batches),
            )  # fmt: skip

    async def WatchSteps(  # noqa: N802 - gRPC's name
        self, request: pb.WatchStepsRequest, context: object
    ) -> AsyncIterator[pb.WatchStepsResponse]:
        run = self._runs.find(request.run_id)
        after = run.book.info().revision if request.from_now else request.after_revision
        events = (to_proto(event) async for event in run.watch(after))

        def bookmark(revision: int) -> pb.WatchStepsResponse:
            return pb.WatchStepsResponse(revision=revision, bookmark=True, durable_step=run.book.durable_step)

        async with aclosing(
            with_bookmarks(events, bookmark, sent=after, at_once=request.from_now, quiet_s=request.bookmark_s)
        ) as messages:
            async for message in messages:
                yield message

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: object) -> pb.SaveCheckpointResponse:  # noqa: N802 - gRPC's name
        run = self._runs.find(request.run_id)
        content, checkpoints = request.SerializeToString(deterministic=True), self._checkpoints_of(run)
        self._saves.check(request.request_id, content)
        begun = checkpoints.asked(
            request.request_id, name=request.name, step=run.book.step, weights_only=request.weights_only
        )

        async def save() -> Checkpoint:
            return await checkpoints.follow(
                request.request_id, lambda: run.save_checkpoint(weights_only=request.weights_only)
            )

        saving = asyncio.create_task(self._saves.once(request.request_id, content, save))
        if request.return_at_once:
            self._saving.add(saving)
            saving.add_done_callback(self._forget_save)
            return pb.SaveCheckpointResponse(step=begun.step, path=begun.path, checkpoint=to_proto(begun))
        saved = await saving
        return pb.SaveCheckpointResponse(step=saved.step, path=saved.path, checkpoint=to_proto(saved))

    def _forget_save(self, saving: asyncio.Task[Checkpoint]) -> None:
        self._saving.discard(saving)
        if not saving.cancelled() and (error := saving.exception()) is not None:
            logger.warning("a checkpoint that was asked for was not written: {}", error)

    def _checkpoints_of(self, run: TrainingQueue) -> CheckpointList:
        book = run.book
        assert book.checkpoints is not None, "a run that is served has a folder"
        return self._checkpoints.setdefault(book.run_id, CheckpointList(book.run_id, book.checkpoints))

    async def ListCheckpoints(  # noqa: N802 - gRPC's name
        self, request: pb.ListCheckpointsRequest, context: object
    ) -> pb.ListCheckpointsResponse:
        listed = await asyncio.to_thread(self._checkpoints_of(self._runs.find(request.run_id)).listed)
        page, token = page_of(request, listed, key_of)
        return pb.ListCheckpointsResponse(checkpoints=map(to_proto, page), next_page_token=token)

    async def CreateRun(self, request: pb.CreateRunRequest, context: object) -> pb.CreateRunResponse:  # noqa: N802 - gRPC's name
        async def create() -> RunInfo:
            self._runs.check_complete()
            if self.host is None:
                held = ", ".join(repr(run.book.run_id) for run in self._runs)
                if any(run.book.run_id == request.run_id for run in self._runs):
                    raise MeshError(Reason.RUN_EXISTS, f"this trainer holds {held} already; choose another run_id")
                raise MeshError(
                    Reason.RUN_LIMIT_REACHED,
                    f"this trainer trains {held} and takes no more runs; start one with trainer.max_concurrent_runs",
                )
            spec = from_proto(RunSpec, request.spec) if request.HasField("spec") else None
            settings = self.host.settings_of(request.run_id, spec)
            caller = CALLER.get()
            return await self.host.create(
                request.run_id,
                settings,
                request_id=request.request_id,
                account="" if caller is None else caller.account,
                most=None if caller is None else caller.scope.max_runs,
            )

        return pb.CreateRunResponse(run=await self._changed(request, create))

    async def _changed(
        self,
        request: pb.CreateRunRequest | pb.SuspendRunRequest | pb.ResumeRunRequest | pb.DeleteRunRequest,
        change: Callable[[], Awaitable[RunInfo | None]],
    ) -> pb.Run | None:
        content = type(request).__name__.encode() + request.SerializeToString(deterministic=True)
        info = await self._changes.once(request.request_id, content, change)
        return None if info is None else to_proto(info)

    async def GetRun(self, request: pb.GetRunRequest, context: object) -> pb.GetRunResponse:  # noqa: N802 - gRPC's name
        return pb.GetRunResponse(run=to_proto(self._info(self._runs.find(request.run_id))))

    async def ListRuns(self, request: pb.ListRunsRequest, context: object) -> pb.ListRunsResponse:  # noqa: N802 - gRPC's name
        self._runs.check_complete()
        page, token = page_of(request, list(self._runs), lambda run: run.book.run_id)
        return pb.ListRunsResponse(runs=[to_proto(self._info(run)) for run in page], next_page_token=token)

    def _info(self, run: TrainingQueue) -> RunInfo:
        return run.book.info() if self.host is None else self.host.info(run)

    async def SuspendRun(self, request: pb.SuspendRunRequest, context: object) -> pb.SuspendRunResponse:  # noqa: N802 - gRPC's name
        host, by = self._host_of(request.run_id), str(CALLER.get() or "")
        run = await self._changed(request, lambda: host.suspend(request.run_id, request.message, by=by))
        return pb.SuspendRunResponse(run=run)

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: object) -> pb.ResumeRunResponse:  # noqa: N802 - gRPC's name
        host = self._host_of(request.run_id)
        return pb.ResumeRunResponse(run=await self._changed(request, lambda: host.resume(request.run_id)))

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: object) -> pb.DeleteRunResponse:  # noqa: N802 - gRPC's name
        async def delete() -> None:
            await self._host_of(request.run_id).delete(request.run_id, keep_checkpoints=request.keep_checkpoints)

        await self._changed(request, delete)
        return pb.DeleteRunResponse()

    def _host_of(self, run_id: str) -> RunHost:
        run = self._runs.find(run_id)
        if self.host is None:
            raise MeshError(Reason.RUN_PROTECTED, f"run {run.book.run_id!r} is this trainer's own; use Drain to end it")
        return self.host

    async def Drain(self, request: pb.DrainRequest, context: object) -> pb.DrainResponse:  # noqa: N802 - gRPC's name
        if request.message:
            logger.info("the trainer is drained: {}", request.message)
        with suppress(TimeoutError):
            async with asyncio.timeout(request.deadline_s if request.HasField("deadline_s") else None):
                await asyncio.gather(*(run.drain() for run in self._runs))
        self._on_drained()
        dropped = sum(run.book.waiting for run in self._runs)
        return pb.DrainResponse(step=self._runs.own.book.step, dropped_batches=dropped)


def check_batch(
    batch: Batch, *, vocab_size: int | None, takes_prefixes: bool = True, routed: RoutedShape | None = None
) -> None:
    """Raises INVALID_REQUEST with every violation. Shapes and lengths are known to be right. `vocab_size` None: token
    ids have no bound."""
    violations = []
    for index, row in enumerate(batch.micro_batches):
        problems = list(_problems(row, vocab_size, takes_prefixes))
        if routed is not None and (told := routes_problem(row.routed_experts, routed)) is not None:
            problems.append(("routed_experts", told))
        violations += [FieldViolation(f"micro_batches[{index}].{name}", problem) for name, problem in problems]
    if violations:
        raise invalid(violations, f"the batch of step {batch.step}")


def _problems(row: MicroBatch, vocab_size: int | None, takes_prefixes: bool) -> Iterator[tuple[str, str]]:
    lengths, first = np.diff(row.sample_offsets), row.sample_offsets[:-1]
    if row.prefix_tokens is not None:
        first = first - row.prefix_tokens
        if not takes_prefixes:
            yield "prefix_tokens", "must be unset: this trainer's attention takes no shared prefixes"
    if (row.position_ids != np.arange(len(row.token_ids)) - np.repeat(first, lengths)).any():
        yield "position_ids", "must count from 0 within each sample, or from its prefix_tokens"
    yield from row_problems(
        token_ids_T=row.token_ids,
        loss_mask_T=row.loss_mask,
        logprobs_T=row.inference_logprobs,
        unpredicted=row.unpredicted,
        temperatures_S=row.temperatures,
        vocab_size=vocab_size,
        logprobs="inference_logprobs",
    )
    if row.ref_logprobs is not None and not are_logprobs(row.ref_logprobs[row.ref_kl_weights != 0]):
        yield "ref_logprobs", "must be logprobs, so finite and not above 0"
    if row.ref_top_ids is not None and row.ref_top_logprobs is not None:
        if vocab_size is not None and (row.ref_top_ids >= vocab_size).any():
            yield "ref_top_ids", f"must be below the vocabulary's {vocab_size} tokens"
        if not are_logprobs(row.ref_top_logprobs[row.ref_top_ids >= 0]):
            yield "ref_top_logprobs", "must be logprobs, so finite and not above 0"
        ordered_TK = np.sort(row.ref_top_ids, axis=1)
        if ((ordered_TK[:, 1:] == ordered_TK[:, :-1]) & (ordered_TK[:, 1:] >= 0)).any():
            yield "ref_top_ids", "must hold each candidate of a token once"
    if row.ref_kl_weights is not None and not are_logprobs(row.inference_logprobs[row.ref_kl_weights != 0]):
        yield "inference_logprobs", "must be logprobs at the tokens of ref_kl, so finite and not above 0"
