"""Servers of rollouts, steps and versions for the orchestrator that follow a script, and note what they saw."""

import asyncio
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from meshrl.core.config.shared import ServerConfig
from meshrl.core.paths import Layout
from meshrl.core.rpc.serve import GrpcServer
from meshrl.core.waiting import set_within
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.ledger.journal import Journal
from meshrl.orchestrator.ledger.open_run import open_journal
from meshrl.orchestrator.ledger.writer import LedgerWriter
from meshrl.orchestrator.work.recipes import build_recipes, least_rollouts
from meshrl.sampling.groups import GroupTicket, TaskRef
from meshrl.trainer.runs.steps import StepBook
from meshrl.trainer.service import check_batch
from meshrl.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc, weights_pb2, weights_pb2_grpc
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import (
    CONTRACT_VERSION,
    Activation,
    AgentState,
    ApplyReport,
    Batch,
    EngineInfo,
    EngineReport,
    EnvironmentInfo,
    Rollout,
    RolloutFailure,
    RolloutRequest,
    RolloutSummary,
    RunInfo,
    Sample,
    TrainerInfo,
    Transport,
    VersionInfo,
    VersionSpan,
    VersionState,
)


@dataclass
class Script:
    """What the servers do, and what they saw."""

    environments: dict[str, int] = field(default_factory=lambda: {"echo": 50})
    rollout_s: float = 0.002
    step_s: float = 0.02
    reward: Callable[[RolloutRequest, int], float] = lambda request, place: float(place % 2)
    delay: Callable[[RolloutRequest], float] = lambda request: 0.0
    fails: Callable[[RolloutRequest, int], bool] = lambda request, place: False
    failure_reason: str = "ENVIRONMENT_FAILED"
    cancels: Callable[[RolloutRequest], bool] = lambda request: False
    refusals: list[Reason] = field(default_factory=list)
    broken_versions: set[int] = field(default_factory=set)
    failing_steps: set[int] = field(default_factory=set)
    alter: Callable[[RolloutRequest, int, Rollout], Rollout] = lambda request, place, rollout: rollout
    vocab_size: int = 100
    tells_vocab_size: bool = True
    refuses: Callable[[Batch], bool] = lambda batch: False
    refused_batches: list[int] = field(default_factory=list)
    durable_every: int = 0
    metrics: dict[str, float] = field(
        default_factory=lambda: {"loss/mean": 0.5, "mismatch_kl/all/mean": 1e-6, "optim/grad_norm": 0.1}
    )
    holds: dict[int, asyncio.Event] = field(default_factory=dict)
    step_holds: dict[int, asyncio.Event] = field(default_factory=dict)
    gone_versions: set[int] = field(default_factory=set)

    engine_version: int = -1
    trained_version: int = 0
    log: list[tuple[str, int]] = field(default_factory=list)
    requests: list[RolloutRequest] = field(default_factory=list)
    headers: list[trainer_pb2.BatchHeader] = field(default_factory=list)
    rollout_versions: dict[str, int] = field(default_factory=dict)
    batches: dict[int, list[str]] = field(default_factory=dict)
    in_flight: int = 0
    cancelled: int = 0
    cancelled_groups: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    refused: Counter[str] = field(default_factory=Counter)
    engines: int = 1
    slots: int | None = 16
    """Rollouts that run at once, as the rollout service says; None: it does not know the call."""
    asked_for_status: int = 0
    uploads: list[tuple[int, int, str]] = field(default_factory=list)
    trained: dict[tuple[int, int], str] = field(default_factory=dict)
    sleep_fails: Reason | None = None
    sleep_takes_s: float = 0.0

    def uploads_of(self, epoch: int, step: int) -> str:
        """The one digest that a process of the trainer was given for a step."""
        (digest,) = {digest for *where, digest in self.uploads if where == [epoch, step]}
        return digest


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def ListEnvironments(self, request, context):  # noqa: N802 - the name is gRPC's
        infos = [EnvironmentInfo(name=name, taskset=name, num_tasks=n) for name, n in self.script.environments.items()]
        return rollout_pb2.ListEnvironmentsResponse(
            contract_version=CONTRACT_VERSION, environments=map(convert.to_proto, infos)
        )

    async def GetRolloutStatus(self, request, context):  # noqa: N802 - the name is gRPC's
        self.script.asked_for_status += 1
        if self.script.slots is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
        return rollout_pb2.GetRolloutStatusResponse(max_concurrent=self.script.slots)

    async def CancelRollouts(self, request, context):  # noqa: N802 - the name is gRPC's
        for group_id in request.group_ids:
            self.script.cancelled_groups[group_id].set()
        return rollout_pb2.CancelRolloutsResponse(cancelled=len(request.group_ids))

    async def RunRollouts(self, message, context):  # noqa: N802 - the name is gRPC's
        script, request = self.script, convert.from_proto(RolloutRequest, message)
        if script.refusals:
            reason = script.refusals.pop()
            script.refused[reason.name] += 1
            raise MeshError(reason, "scripted", retry_after_s=0.01)
        if request.min_version is not None and script.engine_version < request.min_version:
            script.refused["VERSION_NOT_AVAILABLE"] += 1
            raise MeshError(Reason.VERSION_NOT_AVAILABLE, "scripted", retry_after_s=0.01)
        if script.cancels(request):  # as gRPC's server does with a call that is not taken up in time
            await context.abort(grpc.StatusCode.CANCELLED, "")
        script.requests.append(request)
        script.log.append(("generate", script.engine_version))
        script.in_flight += 1
        try:
            finished = failed = 0
            for place in range(request.group_size):
                version = script.engine_version
                stop = script.cancelled_groups[request.group_id]
                if await set_within(stop, script.rollout_s + script.delay(request)):
                    break
                if script.fails(request, place):
                    failed += 1
                    yield convert.rollout_event_to_proto(failure(request, script.failure_reason))
                else:
                    finished += 1
                    rollout = finished_rollout(request, script.reward(request, place), version)
                    rollout = script.alter(request, place, rollout)
                    script.rollout_versions[rollout.rollout_id] = version
                    yield convert.rollout_event_to_proto(rollout)
            cancelled = request.group_size - finished - failed
            summary = RolloutSummary(finished=finished, failed=failed, cancelled=cancelled, sampled_tokens=3 * finished)
            yield convert.rollout_event_to_proto(summary)
        except asyncio.CancelledError:
            script.cancelled += 1
            raise
        finally:
            script.in_flight -= 1


def finished_rollout(request: RolloutRequest, reward: float, version: int) -> Rollout:
    mask = np.array([False, False, True, True, True])
    sample = Sample(
        token_ids=np.arange(5, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        version_spans=(VersionSpan(start=2, end=5, version=version),),
    )
    return Rollout(
        rollout_id=str(uuid.uuid4()),
        group_id=request.group_id,
        task_key=str(request.task_index),
        environment=request.environment,
        samples=(sample,),
        reward=reward,
    )


def failure(request: RolloutRequest, reason: str) -> RolloutFailure:
    return RolloutFailure(
        rollout_id=str(uuid.uuid4()),
        group_id=request.group_id,
        reason=reason,
        message="scripted crash",
        retryable=True,
    )


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """One process of a trainer: its book of steps is the real one, its steps take `step_s`."""

    def __init__(self, script: Script, *, epoch: int = 1, step: int = 0) -> None:
        self.script = script
        self.book = StepBook(run_id="main", epoch=epoch, start_step=step, durable_step=step)
        self.changed = asyncio.Condition()
        script.trained_version = step

    async def GetTrainer(self, request, context):  # noqa: N802 - the name is gRPC's
        info = TrainerInfo(
            world_size=1,
            dp_size=1,
            seq_len=64,
            pad_multiple=1,
            objective="scripted",
            model="scripted",
            runs=(self.book.info(),),
            max_queued_batches=2,
            vocab_size=self.script.vocab_size if self.script.tells_vocab_size else 0,
        )
        return convert.to_proto(info, contract_version=CONTRACT_VERSION)

    async def SubmitBatch(self, parts, context):  # noqa: N802 - the name is gRPC's
        reader = convert.BatchReader(seq_len=64)
        async for part in parts:
            reader.feed(part)
        batch, header = reader.finish(), reader.header
        assert header is not None
        known = self.book.admit(batch.step, header.digest)
        self._check(batch)
        async with self.changed:
            answer = self.book.accept(batch, header.digest)
            self.changed.notify_all()
        self.script.uploads.append((self.book.epoch, batch.step, header.digest))
        if known is None:
            self.script.headers.append(header)
            self.script.batches[batch.step] = [one for row in batch.micro_batches for one in row.rollout_ids]
            self.script.log.append(("batch", batch.step))
        return trainer_pb2.SubmitBatchResponse(revision=answer.revision, queue_position=answer.queue_position)

    def _check(self, batch: Batch) -> None:
        try:
            check_batch(batch, vocab_size=self.script.vocab_size)
            if self.script.refuses(batch):
                raise MeshError(Reason.INVALID_REQUEST, "scripted")
        except MeshError:
            self.script.refused_batches.append(batch.step)
            raise

    async def train(self) -> None:
        script = self.script
        while True:
            async with self.changed:
                while (batch := self.book.take()) is None:
                    await self.changed.wait()
                self.changed.notify_all()
            await asyncio.sleep(script.step_s)
            step = batch.step
            if step in script.step_holds:
                await script.step_holds[step].wait()
            async with self.changed:
                if step in script.failing_steps:
                    self.book.fail(step, Reason.STEP_FAILED, "loss is NaN")
                else:
                    script.trained_version = step
                    script.log.append(("trained", step))
                    script.trained[(self.book.epoch, step)] = script.uploads_of(self.book.epoch, step)
                    timings_s = {"step": script.step_s, "wait_for_batch": 0.0}
                    self.book.finish(step, metrics=script.metrics, timings_s=timings_s)
                    if script.durable_every and step % script.durable_every == 0:
                        self.book.saved(step)
                self.changed.notify_all()

    async def WatchSteps(self, request, context):  # noqa: N802 - the name is gRPC's
        seen = request.after_revision
        while True:
            async with self.changed:
                while not (fresh := self.book.events_after(seen)):
                    await self.changed.wait()
            for event in fresh:
                seen = event.revision
                yield convert.to_proto(event)


class WeightsServicer(weights_pb2_grpc.WeightSyncServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def ListEngines(self, request, context):  # noqa: N802 - the name is gRPC's
        engine = EngineInfo(
            engine_id="e0",
            url="http://127.0.0.1:1",
            engine_pool="",
            state=AgentState.READY,
            serving_version=None,
            routable=True,
            last_seen_s=0.0,
        )
        return weights_pb2.ListEnginesResponse(engines=[convert.to_proto(engine)] * self.script.engines)

    async def SleepEngines(self, request, context):  # noqa: N802 - the name is gRPC's
        self.script.log.append(("sleep", self.script.in_flight))
        await asyncio.sleep(self.script.sleep_takes_s)
        if self.script.sleep_fails is not None:
            raise MeshError(self.script.sleep_fails, "scripted")
        return weights_pb2.SleepEnginesResponse(asleep=1, awake=0, seconds=self.script.sleep_takes_s)

    async def ActivateVersion(self, request, context):  # noqa: N802 - the name is gRPC's
        script, version = self.script, request.version
        if version in script.broken_versions:
            raise MeshError(Reason.ENGINES_NOT_READY, f"engine e0 refused version {version}: DIGEST_MISMATCH")
        if version in script.holds:
            await script.holds[version].wait()
        if version > script.trained_version or version in script.gone_versions:
            script.log.append(("unknown", version))
            raise MeshError(Reason.UNKNOWN_VERSION, f"version {version}")
        await asyncio.sleep(0.005)
        script.engine_version = version
        script.log.append(("active", version))
        info = VersionInfo(
            run_id="main",
            epoch=1,
            version=version,
            artifact_id="a",
            state=VersionState.COMMITTED,
            num_bytes=10,
            transport=Transport.FILESYSTEM,
        )
        applied = ApplyReport(version=version, root=b"r", pause_s=0.001, prepare_s=0.002, requests_kept=0)
        report = EngineReport(engine_id="e0", applied=applied)
        return convert.to_proto(Activation(version=info, engines=(report,), commit_s=0.003, lag_s=0.004))


async def start_server(servicer: RolloutServicer | TrainerServicer | WeightsServicer, port: int) -> GrpcServer:
    server = GrpcServer(ServerConfig(port=port))
    match servicer:
        case RolloutServicer():
            server.add("meshrl.v1.RolloutService", rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer)
        case TrainerServicer():
            server.add("meshrl.v1.TrainerService", trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer)
        case WeightsServicer():
            server.add("meshrl.v1.WeightSync", weights_pb2_grpc.add_WeightSyncServicer_to_server, servicer)
    await server.start()
    server.set_serving()
    return server


def ticket(group_id: str = "g", *, size: int, environment: str = "echo", seed: int | None = None) -> GroupTicket:
    task = TaskRef(environment=environment, index=0)
    return GroupTicket(group_id=group_id, task=task, size=size, for_step=1, min_version=0, active_version=0, seed=seed)


def samples_of(batches: Iterable[Batch]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The environment and the arrays of each sample, None for one that its row lacks."""
    names = ("loss_mask", "advantages", "inference_logprobs", "ce_weights", "ref_kl_weights", "ref_logprobs")
    for batch in batches:
        for row in batch.micro_batches:
            arrays = {name: getattr(row, name) for name in (*names, "ref_top_ids", "ref_top_logprobs")}
            for place, env in enumerate(row.env_index):
                part = slice(row.sample_offsets[place], row.sample_offsets[place + 1])
                own = {name: None if array is None else array[part].tolist() for name, array in arrays.items()}
                yield batch.environments[env], own


def make_journal(
    config: OrchestratorConfig, trainer: TrainerInfo, run: RunInfo, writer: LedgerWriter | None = None
) -> Journal:
    """The journal of the trainer's run, opened as the program opens it. Blocks."""
    return open_journal(
        Layout(config.output_dir),
        trainer,
        run,
        session=config.session,
        least_rollouts=least_rollouts(build_recipes(config.algos, config.advantage, seq_len=config.seq_len)),
        checkpoints=config.checkpoint_interval is not None,
        saves_last=config.checkpoint_at_end,
        writer=writer,
    )
