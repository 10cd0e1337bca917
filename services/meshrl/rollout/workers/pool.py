"""Plays the rollouts of groups at worker processes, with one call for each rollout.

A group stays at one worker while it can; a rollout that is lost with its worker is played again at another, or fails
with the cause, as `blame` decides.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace

from meshrl.rollout.groups import LATE, late, rollout_failure
from meshrl.rollout.player import EpisodeResult, SerializedRollouts, refuse_unknown
from meshrl.rollout.stages import RolloutStage
from meshrl.rollout.workers.blame import Fault, Tries
from meshrl.rollout.workers.fleet import WorkerFleet
from meshrl.rollout.workers.process import WorkerLostError, WorkerProcess
from meshrl.sampling.retry import Patience
from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import EnvironmentInfo, RolloutFailure, RolloutRequest


class PooledPlayer:
    """Plays groups of one environment at the workers of a fleet. `failover_s`: how long a rollout waits for an engine
    that a worker misses, as a model call would."""

    def __init__(self, fleet: WorkerFleet, environment: str, failover_s: float) -> None:
        self._fleet = fleet
        self._environment = environment
        self._failover_s = failover_s

    @property
    def info(self) -> EnvironmentInfo:
        return self._fleet.info(self._environment)

    async def open(self, request: RolloutRequest) -> PooledGroup:
        """Returns at once: the worker that plays the first rollout finds the task, and may still refuse the group.
        Raises MeshError UNKNOWN_TASK where there is none at its index."""
        refuse_unknown(self._environment, self.info.num_tasks, request.task_index or 0)
        return PooledGroup(self._fleet, request, self.info, self._failover_s)

    def opening(self, request: RolloutRequest) -> str:
        return f"environment {self._environment} was {self._fleet.waits_for(self._environment)}"


class PooledGroup:
    late_s = 2.0

    def __init__(self, fleet: WorkerFleet, request: RolloutRequest, info: EnvironmentInfo, failover_s: float) -> None:
        self._fleet = fleet
        self._failover_s = failover_s
        self._request = request
        self._message: pb.RunRolloutsRequest = convert.to_proto(request)
        self._message.group_size = 1
        self._seed = request.sampling.over(info.default_sampling).seed
        self._ends_s = time.monotonic() + request.deadline_s
        self._worker: WorkerProcess | None = None
        self._doing: dict[int, tuple[WorkerProcess | None, float]] = {}
        """By rollout: the worker that plays it, None while it waits for one, and since when."""

    async def play(self, index: int) -> EpisodeResult:
        """Raises the worker's MeshError where that refuses the group."""
        tries, missing = Tries(), Patience(unreachable_s=0.0, retry_s=self._failover_s, base_s=0.1, most_s=1.0)
        try:
            while (left_s := self._ends_s - time.monotonic()) > 0.0:
                self._doing[index] = None, time.time()
                worker = await self._fleet.worker_for(self._request.environment, self._worker)
                self._move_to(worker)
                self._doing[index] = worker, time.time()
                try:
                    return self._result(await worker.play(self._request.environment, self._call(index, left_s)))
                except WorkerLostError as error:
                    self._move_to(None)
                    if not tries.again(error.fault):
                        return self._failure(MeshError(Reason.ENVIRONMENT_FAILED, str(error)))
                except MeshError as error:
                    wait_s = missing.wait_s(error, time.monotonic())
                    if error.reason is not Reason.VERSION_NOT_AVAILABLE or wait_s is None:
                        raise
                    self._doing[index] = None, time.time()
                    await asyncio.sleep(min(wait_s, left_s))
            return self._failure(MeshError(Reason.DEADLINE_PASSED, f"{late(self._request)}: it had not begun"))
        finally:
            self._doing.pop(index, None)

    def stage(self, index: int) -> RolloutStage | None:
        if index not in self._doing:
            return None
        worker, since_s = self._doing[index]
        if worker is None:
            return RolloutStage(self._fleet.waits_for(self._request.environment), since_s)
        words, hold = f"worker {worker.settings.number}", worker.hold()
        if hold is not None:
            words += f", held up by {hold.culprit.environment or 'nobody known'} in {hold.where}"
        return RolloutStage("being played", since_s, worker=words)

    def close(self) -> None:
        self._move_to(None)

    def _move_to(self, worker: WorkerProcess | None) -> None:
        if worker is self._worker:
            return
        if self._worker is not None:
            self._worker.load -= self._request.group_size
        if worker is not None:
            worker.load += self._request.group_size
        self._worker = worker

    def _call(self, index: int, left_s: float) -> pb.RunRolloutsRequest:
        message = pb.RunRolloutsRequest()
        message.CopyFrom(self._message)
        message.request_id = str(uuid.uuid4())
        message.deadline_s = left_s
        if self._seed is not None:
            message.sampling.seed = self._seed + index
        return message

    def _result(self, messages: list[bytes]) -> EpisodeResult:
        summary = pb.RunRolloutsResponse.FromString(messages[-1]).summary
        if summary.finished:
            return SerializedRollouts(messages[:-1], summary.sampled_tokens)
        if not summary.failed:
            raise WorkerLostError("the worker ended the rollout", Fault.UNKNOWN)
        failure = convert.from_proto(RolloutFailure, pb.RunRolloutsResponse.FromString(messages[0]).failure)
        if failure.message.startswith(LATE):  # the worker knows the time that was left
            doing = failure.message.partition(": ")[2]
            return replace(failure, message=f"{late(self._request)}: {doing}")
        return failure

    def _failure(self, error: MeshError) -> RolloutFailure:
        return rollout_failure(self._request, error, str(uuid.uuid4()))
