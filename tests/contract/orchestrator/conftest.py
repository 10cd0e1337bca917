"""A mesh of three real gRPC servers on loopback whose rollouts, steps and versions follow a script."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from opentelemetry import trace

from meshrl.core.config.shared import EnvConfig, ServerConfig, ServicesConfig
from meshrl.core.monitor import JsonlSink, Monitor
from meshrl.core.serve import GrpcServer
from meshrl.orchestrator.config import OrchestratorConfig, TrainEnvsConfig
from meshrl.orchestrator.loop import TrainLoop
from meshrl.orchestrator.opening import open_journal
from meshrl.orchestrator.startup import connect, meet
from meshrl.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc, weights_pb2, weights_pb2_grpc
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import (
    CONTRACT_VERSION,
    Activation,
    AgentState,
    ApplyReport,
    EngineInfo,
    EngineReport,
    EnvironmentInfo,
    Rollout,
    RolloutFailure,
    RolloutRequest,
    RolloutSummary,
    RunInfo,
    Sample,
    StepEvent,
    StepState,
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
    refusals: list[Reason] = field(default_factory=list)
    broken_versions: set[int] = field(default_factory=set)
    failing_steps: set[int] = field(default_factory=set)

    engine_version: int = -1
    trained_version: int = 0
    log: list[tuple[str, int]] = field(default_factory=list)
    requests: list[RolloutRequest] = field(default_factory=list)
    headers: list[trainer_pb2.BatchHeader] = field(default_factory=list)
    rollout_versions: dict[str, int] = field(default_factory=dict)
    batches: dict[int, list[str]] = field(default_factory=dict)
    in_flight: int = 0
    cancelled: int = 0
    cancelled_groups: set[str] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    engines: int = 1


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def ListEnvironments(self, request, context):  # noqa: N802 - the name is gRPC's
        infos = [EnvironmentInfo(name=name, taskset=name, num_tasks=n) for name, n in self.script.environments.items()]
        return rollout_pb2.ListEnvironmentsResponse(
            contract_version=CONTRACT_VERSION, environments=map(convert.environment_to_proto, infos)
        )

    async def CancelRollouts(self, request, context):  # noqa: N802 - the name is gRPC's
        self.script.cancelled_groups |= set(request.group_ids)
        return rollout_pb2.CancelRolloutsResponse(cancelled=len(request.group_ids))

    async def RunRollouts(self, message, context):  # noqa: N802 - the name is gRPC's
        script, request = self.script, convert.rollout_request_from_proto(message)
        if script.refusals:
            reason = script.refusals.pop()
            script.refused[reason.name] += 1
            raise MeshError(reason, "scripted", retry_after_s=0.01)
        if request.min_version is not None and script.engine_version < request.min_version:
            script.refused["VERSION_NOT_AVAILABLE"] += 1
            raise MeshError(Reason.VERSION_NOT_AVAILABLE, "scripted", retry_after_s=0.01)
        script.requests.append(request)
        script.log.append(("generate", script.engine_version))
        script.in_flight += 1
        try:
            finished = failed = 0
            for place in range(request.group_size):
                version = script.engine_version
                await asyncio.sleep(script.rollout_s + script.delay(request))
                if request.group_id in script.cancelled_groups:
                    break
                if script.fails(request, place):
                    failed += 1
                    yield convert.rollout_event_to_proto(failure(request))
                else:
                    finished += 1
                    rollout = finished_rollout(request, script.reward(request, place), version)
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


def failure(request: RolloutRequest) -> RolloutFailure:
    return RolloutFailure(
        rollout_id=str(uuid.uuid4()),
        group_id=request.group_id,
        reason="ENVIRONMENT_FAILED",
        message="scripted crash",
        retryable=True,
    )


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script
        self.events: list[StepEvent] = []
        self.changed = asyncio.Condition()
        self.queue: asyncio.Queue[int] = asyncio.Queue()

    async def GetTrainer(self, request, context):  # noqa: N802 - the name is gRPC's
        run = RunInfo(run_id="main", step=0, version=0, epoch=1, revision=0)
        info = TrainerInfo(
            world_size=1,
            dp_size=1,
            seq_len=64,
            pad_multiple=1,
            objective="scripted",
            model="scripted",
            runs=(run,),
            max_queued_batches=2,
        )
        return convert.trainer_info_to_proto(info, contract_version=CONTRACT_VERSION)

    async def SubmitBatch(self, parts, context):  # noqa: N802 - the name is gRPC's
        header, rollouts = None, []
        async for part in parts:
            if part.HasField("header"):
                header = part.header
            else:
                rollouts += part.micro_batch.rollout_ids
        assert header is not None
        self.script.headers.append(header)
        self.script.batches[header.step] = rollouts
        self.script.log.append(("batch", header.step))
        await self.emit(StepEvent(revision=0, step=header.step, state=StepState.QUEUED))
        await self.queue.put(header.step)
        return trainer_pb2.SubmitBatchResponse(revision=len(self.events), queue_position=0)

    async def emit(self, event: StepEvent) -> None:
        async with self.changed:
            numbered = {name: getattr(event, name) for name in event.__dataclass_fields__} | {
                "revision": len(self.events) + 1
            }
            self.events.append(StepEvent(**numbered))
            self.changed.notify_all()

    async def train(self) -> None:
        while True:
            step = await self.queue.get()
            await asyncio.sleep(self.script.step_s)
            if step in self.script.failing_steps:
                await self.emit(
                    StepEvent(
                        revision=0, step=step, state=StepState.FAILED, reason="STEP_FAILED", message="loss is NaN"
                    )
                )
                continue
            self.script.trained_version = step
            self.script.log.append(("trained", step))
            metrics = {"loss/mean": 0.5, "mismatch_kl/all/mean": 1e-6, "optim/grad_norm": 0.1}
            timings = {"step": self.script.step_s, "wait_for_batch": 0.0}
            await self.emit(
                StepEvent(revision=0, step=step, state=StepState.DONE, version=step, metrics=metrics, timings_s=timings)
            )

    async def WatchSteps(self, request, context):  # noqa: N802 - the name is gRPC's
        seen = request.after_revision
        while True:
            async with self.changed:
                while len(self.events) <= seen:
                    await self.changed.wait()
                fresh = self.events[seen:]
            for event in fresh:
                seen = event.revision
                yield convert.step_event_to_proto(event)


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
        return weights_pb2.ListEnginesResponse(engines=[convert.engine_info_to_proto(engine)] * self.script.engines)

    async def ActivateVersion(self, request, context):  # noqa: N802 - the name is gRPC's
        script, version = self.script, request.version
        if version in script.broken_versions:
            raise MeshError(Reason.ENGINES_NOT_READY, f"engine e0 refused version {version}: DIGEST_MISMATCH")
        if version > script.trained_version:
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
        return convert.activation_to_proto(Activation(version=info, engines=(report,), commit_s=0.003, lag_s=0.004))


@dataclass
class RunningMesh:
    script: Script
    services: ServicesConfig
    servers: dict[str, GrpcServer]


@asynccontextmanager
async def serve(script: Script) -> AsyncIterator[RunningMesh]:
    trainer = TrainerServicer(script)
    parts = {
        "rollout": (
            "meshrl.v1.RolloutService",
            rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
            RolloutServicer(script),
        ),
        "trainer": ("meshrl.v1.TrainerService", trainer_pb2_grpc.add_TrainerServiceServicer_to_server, trainer),
        "weights": (
            "meshrl.v1.WeightSync",
            weights_pb2_grpc.add_WeightSyncServicer_to_server,
            WeightsServicer(script),
        ),
    }
    servers, addresses = {}, {}
    for name, (service, adder, servicer) in parts.items():
        servers[name] = GrpcServer(ServerConfig(port=0))
        servers[name].add(service, adder, servicer)
        addresses[name] = f"127.0.0.1:{await servers[name].start()}"
        servers[name].set_serving()
    training = asyncio.create_task(trainer.train())
    try:
        yield RunningMesh(script=script, services=ServicesConfig(**addresses), servers=servers)
    finally:
        training.cancel()
        for server in servers.values():
            await server.drain(grace_s=0.0)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def mesh(script: Script) -> AsyncIterator[RunningMesh]:
    async with serve(script) as running:
        yield running


@pytest.fixture
def make_config(tmp_path: Path):
    def make(services: ServicesConfig, **changes) -> OrchestratorConfig:
        values = {
            "train": TrainEnvsConfig(env=[EnvConfig(id="echo")]),
            "batch_size": 8,
            "group_size": 4,
            "seq_len": 64,
            "max_steps": 4,
            "services": services,
            "output_dir": tmp_path,
            "deadlines": {"startup_s": 5.0, "unreachable_s": 0.5, "step_s": 10.0, "batch_s": 10.0, "activation_s": 5.0},
        }
        return OrchestratorConfig.model_validate(values | changes)

    return make


@pytest.fixture
def start(tmp_path: Path):
    """Runs the loop for a config against its services; yields the loop and its ledger."""

    @asynccontextmanager
    async def start(config: OrchestratorConfig):
        services = connect(config)
        monitor = Monitor([JsonlSink(tmp_path / "metrics.jsonl")])
        try:
            met = await meet(config, services)
            journal = await asyncio.to_thread(open_journal, config, met, flush_interval_s=0.01)
            try:
                tracer = trace.get_tracer("test")
                yield TrainLoop(config, services, met, journal=journal, monitor=monitor, tracer=tracer), journal
            finally:
                await asyncio.to_thread(journal.close)
        finally:
            await services.close()
            monitor.close()

    return start
