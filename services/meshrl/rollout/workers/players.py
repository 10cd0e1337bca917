"""Plays groups in worker processes, as `episodes` does in this one.

Called by `group_runner`. A group is played in one worker. A rollout that is lost with its worker is played again in
another, or fails with the cause, as `blame` decides.
"""

from __future__ import annotations

import asyncio
import time
import uuid

from meshrl.rollout.deadlines.stages import RolloutStage
from meshrl.rollout.groups import rollout_failure
from meshrl.rollout.player import EpisodeResult
from meshrl.rollout.workers.blame import Tries
from meshrl.rollout.workers.fleet import WorkerFleet
from meshrl.rollout.workers.process import WorkerLostError, WorkerProcess
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import EnvironmentInfo, RolloutRequest


class WorkerPlayer:
    """Plays groups of one environment in the workers of a fleet."""

    def __init__(self, fleet: WorkerFleet, environment: str) -> None:
        self._fleet = fleet
        self._environment = environment

    @property
    def info(self) -> EnvironmentInfo:
        return self._fleet.info(self._environment)

    async def open(self, request: RolloutRequest) -> WorkerGroup:
        """Has a worker find the group's task. Raises what the environment's own player does there, and
        ENVIRONMENT_FAILED when the environment ended one worker after the other.
        """
        group = WorkerGroup(self._fleet, request)
        await group.place()
        return group

    def opening(self, request: RolloutRequest) -> str:
        return f"environment {self._environment} was {self._fleet.waits_for(self._environment)}"


class WorkerGroup:
    """The rollouts of one group, in the worker that has it open."""

    def __init__(self, fleet: WorkerFleet, request: RolloutRequest) -> None:
        self._fleet = fleet
        self._request = request
        self._payload = convert.to_proto(request).SerializeToString()
        self._places: list[tuple[WorkerProcess, int]] = []  # the last one is the one to use
        self._placing = asyncio.Lock()
        self._playing: dict[int, tuple[WorkerProcess, int]] = {}
        self._waiting_since: dict[int, float] = {}

    async def place(self) -> tuple[WorkerProcess, int]:
        """The worker that has the group open, and the group's number there; opens it again where that one is gone.

        Raises MeshError.
        """
        environment, tries = self._request.environment, Tries()
        async with self._placing:
            while True:
                if self._places:
                    worker, number = self._places[-1]  # it may be lost, or be left to what blocks it
                    if number in worker.groups and self._fleet.plays_here(environment, worker):
                        return worker, number
                worker, number = await self._fleet.worker_for(environment), self._fleet.next_group()
                try:
                    await worker.open(number, environment, self._request.group_size, self._payload)
                except WorkerLostError as error:  # another one may do better
                    if not tries.again(error.fault):
                        raise MeshError(Reason.ENVIRONMENT_FAILED, str(error)) from error
                else:
                    self._places.append((worker, number))
                    return self._places[-1]

    async def play(self, index: int) -> EpisodeResult:
        """Raises nothing but CancelledError."""
        tries = Tries()
        try:
            while True:
                self._waiting_since[index] = time.time()
                worker, number = self._playing[index] = await self.place()
                try:
                    return await worker.play(number, index)
                except asyncio.CancelledError:
                    worker.cancel(number, index)
                    raise
                except WorkerLostError as error:
                    if not tries.again(error.fault):
                        raise MeshError(Reason.ENVIRONMENT_FAILED, str(error)) from error
                self._playing.pop(index, None)
        except MeshError as error:
            return rollout_failure(self._request, error, str(uuid.uuid4()))
        finally:
            self._playing.pop(index, None)
            self._waiting_since.pop(index, None)

    def stage(self, index: int) -> RolloutStage | None:
        if (playing := self._playing.get(index)) is not None:
            return playing[0].stage(playing[1], index)
        since_s = self._waiting_since.get(index)
        return None if since_s is None else RolloutStage(self._fleet.waits_for(self._request.environment), since_s)

    def close(self) -> None:
        """Has its workers forget the group."""
        for worker, number in self._places:
            worker.close_group(number)
