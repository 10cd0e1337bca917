"""Rollouts, trainer and weight hub that cost next to nothing, for `orchestrator --bench`; a process of its own.

A rollout is random tokens of random length with a reward of 0 or 1. A batch is trained once it is read, a version
served once it is asked for.
"""

# ruff: noqa: N802 (methods are named after the RPCs of the contract)

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.serve import GrpcServer
from meshrl.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc, weights_pb2, weights_pb2_grpc
from meshrl.wire import convert
from meshrl.wire.types import (
    CONTRACT_VERSION,
    Activation,
    AgentState,
    ApplyReport,
    EngineInfo,
    EngineReport,
    EnvironmentInfo,
    Rollout,
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

RUN = "main"
VOCAB_SIZE = 32_000
SLOTS = 4096
ENGINE = "made-up"


class MadeUpRollouts(rollout_pb2_grpc.RolloutServiceServicer):
    """Rollouts of at most `most_tokens` tokens, a quarter of them the prompt's."""

    def __init__(self, names: list[str], most_tokens: int) -> None:
        self.version = 0
        self._names = names
        self._most = most_tokens
        self._draw = np.random.default_rng(0)

    async def ListEnvironments(
        self, request: rollout_pb2.ListEnvironmentsRequest, context: object
    ) -> rollout_pb2.ListEnvironmentsResponse:
        infos = [EnvironmentInfo(name=name, taskset=name, num_tasks=100_000) for name in self._names]
        return rollout_pb2.ListEnvironmentsResponse(
            contract_version=CONTRACT_VERSION, environments=map(convert.to_proto, infos)
        )

    async def GetRolloutStatus(
        self, request: rollout_pb2.GetRolloutStatusRequest, context: object
    ) -> rollout_pb2.GetRolloutStatusResponse:
        return rollout_pb2.GetRolloutStatusResponse(max_concurrent=SLOTS)

    async def CancelRollouts(
        self, request: rollout_pb2.CancelRolloutsRequest, context: object
    ) -> rollout_pb2.CancelRolloutsResponse:
        return rollout_pb2.CancelRolloutsResponse()

    async def RunRollouts(
        self, message: rollout_pb2.RunRolloutsRequest, context: object
    ) -> AsyncIterator[rollout_pb2.RunRolloutsResponse]:
        request = convert.from_proto(RolloutRequest, message)
        prompt_ids = self._draw.integers(0, VOCAB_SIZE, max(1, self._most // 4)).astype(np.int32)
        sampled = 0
        for index in range(request.group_size):
            count = int(self._draw.integers(1, self._most - len(prompt_ids) + 1))
            sampled += count
            yield convert.rollout_event_to_proto(
                Rollout(
                    rollout_id=str(uuid.uuid4()),
                    group_id=request.group_id,
                    task_key=str(request.task_index),
                    environment=request.environment,
                    samples=(self._make_sample(prompt_ids, count),),
                    reward=float(index % 2),
                )
            )
        summary = RolloutSummary(finished=request.group_size, failed=0, cancelled=0, sampled_tokens=sampled)
        yield convert.rollout_event_to_proto(summary)

    def _make_sample(self, prompt_ids: NDArray[np.int32], count: int) -> Sample:
        total = len(prompt_ids) + count
        mask = np.arange(total) >= len(prompt_ids)
        completion_ids = self._draw.integers(0, VOCAB_SIZE, count).astype(np.int32)
        return Sample(
            token_ids=np.concatenate([prompt_ids, completion_ids]),
            loss_mask=mask,
            logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
            version_spans=(VersionSpan(start=len(prompt_ids), end=total, version=self.version),),
        )


class EagerTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len
        self._events: list[StepEvent] = []
        self._changed = asyncio.Condition()

    async def GetTrainer(
        self, request: trainer_pb2.GetTrainerRequest, context: object
    ) -> trainer_pb2.GetTrainerResponse:
        step = self._events[-1].step if self._events else 0
        run = RunInfo(run_id=RUN, step=step, version=step, epoch=1, revision=len(self._events), durable_step=step)
        info = TrainerInfo(
            world_size=1, dp_size=1, seq_len=self._seq_len, pad_multiple=1, objective="none", model="made-up",
            runs=(run,), max_queued_batches=2, vocab_size=VOCAB_SIZE,
        )  # fmt: skip
        answer: trainer_pb2.GetTrainerResponse = convert.to_proto(info, contract_version=CONTRACT_VERSION)
        return answer

    async def SubmitBatch(
        self, parts: AsyncIterator[trainer_pb2.SubmitBatchRequest], context: object
    ) -> trainer_pb2.SubmitBatchResponse:
        reader = convert.BatchReader(seq_len=self._seq_len)
        async for part in parts:
            reader.feed(part)
        step = reader.finish().step
        async with self._changed:
            if not self._events or self._events[-1].step < step:
                self._say(step, StepState.QUEUED)
                self._say(step, StepState.RUNNING)
                self._say(step, StepState.DONE)
                self._changed.notify_all()
        return trainer_pb2.SubmitBatchResponse(revision=len(self._events))

    def _say(self, step: int, state: StepState) -> None:
        done = state is StepState.DONE
        self._events.append(
            StepEvent(
                revision=len(self._events) + 1, step=step, state=state, version=step if done else None,
                timings_s={"step": 0.0, "wait_for_batch": 0.0} if done else {}, durable_step=step if done else step - 1,
            )
        )  # fmt: skip

    async def WatchSteps(
        self, request: trainer_pb2.WatchStepsRequest, context: object
    ) -> AsyncIterator[trainer_pb2.WatchStepsResponse]:
        seen = request.after_revision
        while True:
            async with self._changed:
                while len(self._events) <= seen:
                    await self._changed.wait()
                fresh = self._events[seen:]
            seen += len(fresh)
            for event in fresh:
                yield convert.to_proto(event)


class EagerHub(weights_pb2_grpc.WeightSyncServicer):
    def __init__(self, rollouts: MadeUpRollouts) -> None:
        self._rollouts = rollouts

    async def ListEngines(
        self, request: weights_pb2.ListEnginesRequest, context: object
    ) -> weights_pb2.ListEnginesResponse:
        engine = EngineInfo(
            engine_id=ENGINE, url="http://127.0.0.1:1", engine_pool="", state=AgentState.READY,
            serving_version=self._rollouts.version, routable=True, last_seen_s=0.0,
        )  # fmt: skip
        return weights_pb2.ListEnginesResponse(engines=[convert.to_proto(engine)])

    async def ActivateVersion(
        self, request: weights_pb2.ActivateVersionRequest, context: object
    ) -> weights_pb2.ActivateVersionResponse:
        self._rollouts.version = request.version
        info = VersionInfo(
            run_id=RUN, epoch=1, version=request.version, artifact_id="none", state=VersionState.COMMITTED, num_bytes=1,
            transport=Transport.FILESYSTEM,
        )  # fmt: skip
        applied = ApplyReport(version=request.version, root=b"none", pause_s=0.0, prepare_s=0.0, requests_kept=0)
        report = EngineReport(engine_id=ENGINE, applied=applied)
        answer: weights_pb2.ActivateVersionResponse = convert.to_proto(
            Activation(version=info, engines=(report,), commit_s=0.0, lag_s=0.0)
        )
        return answer


async def serve(seq_len: int, most_tokens: int, names: list[str]) -> None:
    """Serves all three on one port, prints the port on stdout, and ends when stdin does."""
    rollouts = MadeUpRollouts(names, most_tokens)
    server = GrpcServer(ServerConfig(port=0))
    server.add("meshrl.v1.RolloutService", rollout_pb2_grpc.add_RolloutServiceServicer_to_server, rollouts)
    server.add("meshrl.v1.TrainerService", trainer_pb2_grpc.add_TrainerServiceServicer_to_server, EagerTrainer(seq_len))
    server.add("meshrl.v1.WeightSync", weights_pb2_grpc.add_WeightSyncServicer_to_server, EagerHub(rollouts))
    port = await server.start()
    server.set_serving()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.drain(grace_s=0.0)


def main() -> None:
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    order = json.loads(sys.argv[1])
    asyncio.run(serve(order["seq_len"], order["most_tokens"], order["names"]))


if __name__ == "__main__":
    main()
