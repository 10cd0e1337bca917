"""All workers of the service: which environment is played where, and what happens when a worker is lost.

A group stays at one worker while it can; a rollout that is lost with its worker is played again at another, or fails,
as `blame` decides.

Environments share the workers of `rollout.workers` unless they ask for their own. When a shared worker is lost, the
environment whose code did it gets workers of its own; if the cause is unknown, each that played there does, and the
next loss shows it. A shared worker that code blocks is left to its environment. A standby, which has loaded the shared
environments too, takes over from a lost worker at once; the lost one's place starts the next standby.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from loguru import logger

from meshrl.core.config.shared import EnvConfig
from meshrl.core.telemetry.tracing import ENDPOINT_VARIABLES
from meshrl.core.waiting import Pulse
from meshrl.machine.memory import machine_memory
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.groups import LATE, late, rollout_failure
from meshrl.rollout.player import EpisodeResult, SerializedRollouts, refuse_unknown
from meshrl.rollout.stages import RolloutStage
from meshrl.rollout.workers.blame import Fault, Tries
from meshrl.rollout.workers.place import Loss, PlaceLimits, WorkerPlace
from meshrl.rollout.workers.process import WorkerLostError, WorkerProcess, WorkerSettings
from meshrl.sampling.retry import Patience
from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import EnvironmentInfo, RolloutFailure, RolloutRequest

LOOK_EVERY_S = 0.25
STOOD_STILL_S = 1.0
LEFT_AFTER_S = 1.0
"""Seconds that code may block a shared worker before the others leave it, if they have another."""
STOP_GRACE_S = 5.0
EXPORT_GRACE_S = 20.0
"""A worker that is asked to end first sends its last spans to a collector."""
MOST_WORKERS = 32
UNKNOWN_MEMORY_MIB = 4096
"""A worker's bound if the machine's memory is unknown."""


class WorkerFleet:
    """An async context manager, used from one event loop."""

    def __init__(self, config: RolloutConfig) -> None:
        self._entries = {entry.resolved_name: entry for entry in config.env if config.workers or _asks_for_own(entry)}
        memory = machine_memory()
        half_mib = UNKNOWN_MEMORY_MIB if memory is None else memory.total >> 21
        self._max_memory_mib = config.max_memory_mib or half_mib
        self._config = config
        own = {name: max(entry.workers or 0, 1) for name, entry in self._entries.items() if _asks_for_own(entry)}
        self._shared_names = {name for name in self._entries if name not in own}
        self._changed = Pulse()
        self._numbers = itertools.count(1)
        shared = count_of(config.workers) if self._shared_names else 0
        self._shared = [self._place(None) for _ in range(shared)]
        self._own = {name: [self._place(name) for _ in range(count)] for name, count in own.items()}
        self._with_standby = config.standby and shared > 0
        self._standby: WorkerPlace | None = None
        self._infos: dict[str, EnvironmentInfo] = {}
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> WorkerFleet:
        """Raises ConfigError when an environment cannot be loaded."""
        started = await asyncio.gather(*(place.first() for place in self._places()), return_exceptions=True)
        for worker in started:
            if isinstance(worker, BaseException):
                await self.__aexit__()
                raise worker
            self._infos |= {info.name: info for info in worker.infos}
        self._start_standby()
        self._looking = asyncio.create_task(self._check_forever())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._looking is not None:
            self._looking.cancel()
        grace_s = EXPORT_GRACE_S if any(os.environ.get(name) for name in ENDPOINT_VARIABLES) else STOP_GRACE_S
        await asyncio.gather(*(place.close(grace_s) for place in self._places_and_standby()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def workers_of(self, environment: str) -> str:
        numbers = [place.number for place in self._places_of(environment)]
        which = f"worker {numbers[0]}" if len(numbers) == 1 else f"workers {numbers[0]} to {numbers[-1]}"
        return which + (" of its own" if environment in self._own else "")

    def info(self, environment: str) -> EnvironmentInfo:
        return self._infos[environment]

    def in_flight(self) -> Mapping[str, int]:
        calls: Counter[str] = Counter()
        for place in self._places():
            if place.worker is not None:
                calls.update(place.worker.in_flight)
        return calls

    async def worker_for(self, environment: str, before: WorkerProcess | None) -> WorkerProcess:
        """The one `before`, else the least loaded. Waits for one that starts; one with a blocked event loop is used
        only without another."""
        while True:
            upcoming = self._changed.upcoming
            usable = [place.worker for place in self._places_of(environment) if place.worker and place.worker.usable]
            if before in usable and not before.hold():
                return before
            if usable:
                return min(usable, key=lambda worker: (worker.hold() is not None, worker.load))
            await upcoming.wait()

    def waits_for(self, environment: str) -> str:
        now_s = time.monotonic()
        soonest = min((place.again_at_s for place in self._places_of(environment)), default=now_s)
        return f"waiting for a worker, the next of which starts in {max(0.0, soonest - now_s):.0f} s"

    def _places(self) -> list[WorkerPlace]:
        return [*self._shared, *itertools.chain.from_iterable(self._own.values())]

    def _places_and_standby(self) -> list[WorkerPlace]:
        return self._places() if self._standby is None else [*self._places(), self._standby]

    def _places_of(self, environment: str) -> list[WorkerPlace]:
        return self._own.get(environment, self._shared)

    def _place(self, environment: str | None) -> WorkerPlace:
        if environment is None and len(self._shared_names) == 1:
            (environment,) = self._shared_names
        settings = WorkerSettings(number=next(self._numbers), config=self._config)
        return WorkerPlace(settings, environment, self._hosting, self._on_lost, self._changed.beat)

    def _hosting(self, environment: str | None) -> tuple[Collection[str], PlaceLimits]:
        if environment is None:
            limits = PlaceLimits(self._config.blocked_s, self._max_memory_mib)
            return [name for name in self._entries if name in self._shared_names], limits
        entry = self._entries[environment]
        return (environment,), PlaceLimits(entry.deadlines.blocked_s, entry.max_memory_mib or self._max_memory_mib)

    def _start_standby(self) -> None:
        if self._with_standby and self._standby is None and len(self._shared_names) > 1:
            self._standby = self._place(None)
            self._standby.keep_starting()

    def _on_lost(self, worker: WorkerProcess, loss: Loss) -> None:
        hosted, number = worker.settings.names, worker.settings.number
        played = Counter(call.environment for call in worker.calls.values())
        busy = set(played)
        suspects = {loss.culprit.environment} if loss.culprit.environment else busy
        known = len(suspects) == 1
        causes = {name: f"environment {name}: its worker {number} {loss.words}" for name in busy}
        for name in suspects if known else ():
            logger.bind(env=name).error("environment {}: its worker {} {}", name, number, loss.words)
        if not known:
            names = ", ".join(sorted(suspects)) or "nothing"
            logger.error("worker {}, which played {}, {}", number, names, loss.words)
        sharing = self._shared_names.intersection(hosted)
        if len(sharing) > 1:
            for name in sorted(suspects & sharing, key=lambda name: (-played[name], name)):
                self._move_out(name, known=known)
        self._replace(number)
        self._start_standby()
        worker.lose(causes, loss.culprit)
        self._changed.beat()

    def _move_out(self, name: str, *, known: bool) -> None:
        self._shared_names.discard(name)
        if self._standby is not None and not known:  # what played most goes on at once
            place, self._standby = self._standby, None
            place.environment = name
        else:
            place = self._place(name)
            place.keep_starting()
        self._own[name] = [place]
        why = "so that others keep their pace" if known else "to find out whose code it was"
        logger.bind(env=name).warning(
            "environment {} gets worker {} of its own, {}; isolated = true does so from the start",
            name, place.number, why,
        )  # fmt: skip

    def _leave_to_blocker(self, place: WorkerPlace) -> None:
        worker, standby = place.worker, self._standby
        hold = worker.hold() if worker is not None and worker.usable else None
        if worker is None or hold is None or not hold.culprit.environment or hold.seconds < LEFT_AFTER_S:
            return
        name = hold.culprit.environment
        ready = standby is not None and standby.worker is not None and standby.worker.usable
        if standby is not None and ready and name in self._shared_names and len(self._shared_names) > 1:
            logger.info("worker {} takes the place of worker {}", standby.number, place.number)
            self._shared[self._shared.index(place)], self._standby = standby, None
            self._shared_names.discard(name)
            self._own[name] = [place]
            place.environment = name
            logger.bind(env=name).warning(
                "environment {} keeps worker {}, which it blocks in {}, to itself, so that others keep their pace;"
                " isolated = true gives it one from the start", name, place.number, hold.where,
            )  # fmt: skip
            self._start_standby()
        elif not any(one.worker and one.worker.usable and not one.worker.hold() for one in self._shared):
            return  # there is nowhere to go
        worker.leave_to(name)
        self._changed.beat()

    def _replace(self, number: int) -> None:
        lost = next((place for place in self._shared if place.number == number), None)
        if lost is None:  # it was not shared, or stood by
            return
        if self._standby is not None:
            logger.info("worker {} takes the place of worker {}", self._standby.number, number)
            self._shared[self._shared.index(lost)], self._standby = self._standby, lost
        elif not self._shared_names:
            self._shared.remove(lost)
        if len(self._shared_names) < 2 and lost not in self._shared:
            lost.retire()
            self._standby = None

    async def _check_forever(self) -> None:
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = time.monotonic()
            stood_still_s = now_s - looked_s - LOOK_EVERY_S
            looked_s = now_s
            for place in self._places_and_standby():
                if stood_still_s > STOOD_STILL_S:
                    place.forgive(stood_still_s)
                    continue
                if place in self._shared:
                    self._leave_to_blocker(place)
                place.look()


class PooledPlayer:
    """`failover_s`: how long a rollout waits for an engine that its worker misses."""

    def __init__(self, fleet: WorkerFleet, environment: str, failover_s: float) -> None:
        self._fleet = fleet
        self._environment = environment
        self._failover_s = failover_s

    @property
    def info(self) -> EnvironmentInfo:
        return self._fleet.info(self._environment)

    async def open(self, request: RolloutRequest) -> PooledEpisodes:
        """Returns at once: the worker that plays the first rollout finds the task, and may still refuse the group.
        Raises MeshError UNKNOWN_TASK if there is none at its index."""
        refuse_unknown(self._environment, self.info.num_tasks, request.task_index or 0)
        return PooledEpisodes(self._fleet, request, self.info, self._failover_s)

    def opening(self, request: RolloutRequest) -> str:
        return f"environment {self._environment} was {self._fleet.waits_for(self._environment)}"


class PooledEpisodes:
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
        """The worker that plays each rollout, None while it waits for one, and since when."""

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


def _asks_for_own(entry: EnvConfig) -> bool:
    return entry.isolated or entry.workers is not None or entry.max_memory_mib is not None


def count_of(workers: int | Literal["auto"]) -> int:
    if workers != "auto":
        return workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores - max(2, cores // 4), MOST_WORKERS))
