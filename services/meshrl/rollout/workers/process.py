"""The front's side of one worker process: sends it groups and rollouts, receives their results, and ends it.

Owned by a slot of the fleet, which starts another process when this one is lost. Every question to a worker ends with
an answer or with `WorkerLostError`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from google.rpc import status_pb2

from meshrl.core.config import ConfigError
from meshrl.core.orphans import WORKER_MARK, end_marked
from meshrl.core.program import how_it_ended
from meshrl.rollout.deadlines.stages import BEGINNING, RolloutStage, StageKind
from meshrl.rollout.player import EpisodeResult
from meshrl.rollout.rendering.tokenizer_folders import known_class
from meshrl.rollout.workers.blame import NO_ROLLOUT, NOBODY, Culprit, Fault
from meshrl.rollout.workers.frames import Channel, FrameKind, Heartbeat, WorkerSettings, unpack_rollouts
from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason, from_rpc_status
from meshrl.wire.types import EnvironmentInfo, RolloutFailure

PRELOADED = "meshrl.rollout.workers.preload"
ANY_TOKENIZER = "meshrl.rollout.workers.preload_tokenizers"
EXIT_CODE_S = 5.0
ALARM_IS_FRESH_S = 2.0


class WorkerLostError(Exception):
    """The worker is gone, or left to another environment; `fault` is whose doing it was."""

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True)
class Hold:
    """What holds a worker's event loop up: the code of `culprit` at `where`, for `seconds`."""

    culprit: Culprit
    where: str
    seconds: float

    @classmethod
    def decode(cls, payload: bytes) -> Hold:
        told = json.loads(payload)
        return cls(Culprit(told["environment"], tuple(told["rollout"])), told["where"], told["seconds"])


@dataclass
class Assigned:
    """A rollout that a worker plays. `began_s` and the stage are of time.time."""

    environment: str
    answer: asyncio.Future[EpisodeResult]
    began_s: float
    stage: RolloutStage


_ONE_AT_A_TIME = threading.Lock()
"""multiprocessing reads the exit codes of all its children whenever it starts one; only one thread may do that."""


def new_process(front: socket.socket, alarm: socket.socket, settings: WorkerSettings) -> BaseProcess:
    """Starts a worker; blocking. The first one waits until a fork server has imported what workers need, which takes
    seconds; those after it take milliseconds. Where there are no fork servers each imports for itself.
    """
    method = "forkserver" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        config = settings.config
        known = known_class(config.tokenizer or config.model.name) is not None
        multiprocessing.set_forkserver_preload([PRELOADED] if known else [PRELOADED, ANY_TOKENIZER])
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # typeshed has it on each kind of context
        target=run_worker, args=(front, alarm, settings.encode()), name=f"rollout-worker-{settings.number}"
    )
    with _ONE_AT_A_TIME:
        process.start()
    return process


def exit_code(process: BaseProcess, deadline_s: float) -> int | None:
    """The exit code of a process that ends within the deadline, else None; blocking."""
    wait([process.sentinel], deadline_s)
    with _ONE_AT_A_TIME:
        return process.exitcode


def run_worker(front: socket.socket, alarm: socket.socket, order: str) -> None:
    """What a worker's process does; the front does not import it."""
    from meshrl.rollout.workers import worker

    worker.main(front, alarm, order)


class WorkerProcess:
    """One worker process. Use from one event loop."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = replace(settings, mark=secrets.token_hex(16))
        self.infos: tuple[EnvironmentInfo, ...] = ()
        self.in_flight: dict[str, int] = {}
        self.rollouts: dict[tuple[int, int], Assigned] = {}
        self.groups: dict[int, tuple[str, int]] = {}  # environment and size
        self.heard_s = time.monotonic()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        """The process has ended, or is about to."""
        self.exiter = NOBODY
        """Whose code ends the process, as far as it has reported that."""
        self.ended_by = ""
        """Why the front ended it, "" where it did not."""
        self._opening: dict[int, asyncio.Future[None]] = {}
        self._held: tuple[Hold, float] | None = None
        self._process: BaseProcess | None = None
        self._front: Channel | None = None
        self._alarm: Channel | None = None
        self._asked_to_stop = False
        self._loaded_mib = 0

    async def start(self) -> None:
        """Starts the process; `ready` returns when its environments are loaded, or why they cannot be (ConfigError)."""
        front, its_front = socket.socketpair()
        alarm, its_alarm = socket.socketpair()

        def abandon(started: asyncio.Future[BaseProcess]) -> None:
            for end in (front, its_front, alarm, its_alarm):
                end.close()
            if not started.cancelled() and started.exception() is None:
                started.result().kill()

        starting = asyncio.get_running_loop().run_in_executor(None, new_process, its_front, its_alarm, self.settings)
        try:
            self._process = await asyncio.shield(starting)
        except BaseException:  # a thread cannot be stopped: what it starts is ended when it has been started
            starting.add_done_callback(abandon)
            self.gone.set()
            raise
        its_front.close()
        its_alarm.close()
        self._front = await Channel.over(front, self._on_frame, self.gone.set)
        self._alarm = await Channel.over(alarm, self._on_frame)
        self.heard_s = time.monotonic()

    @property
    def load(self) -> int:
        """Rollouts of the groups that it has."""
        return sum(size for _, size in self.groups.values())

    @property
    def usable(self) -> bool:
        """True while it takes groups."""
        return self.ready.done() and not self.gone.is_set() and not self.ended_by and not self._asked_to_stop

    def hold(self) -> Hold | None:
        """The code that blocks its event loop now, by its own report."""
        if self._held is None:
            return None
        hold, said_s = self._held
        since_s = time.monotonic() - said_s
        return replace(hold, seconds=hold.seconds + since_s) if since_s < ALARM_IS_FRESH_S else None

    async def open(self, group: int, environment: str, size: int, payload: bytes) -> None:
        """Has it find the task of a group. Raises what the environment's player does, and WorkerLostError."""
        assert self._front is not None  # started
        self.groups[group] = (environment, size)
        opening = self._opening[group] = asyncio.get_running_loop().create_future()
        self._front.send(FrameKind.OPEN, group, payload=payload)
        try:
            await opening
        except BaseException:
            self.close_group(group)
            raise
        finally:
            self._opening.pop(group, None)

    async def play(self, group: int, index: int) -> EpisodeResult:
        """Has it play a rollout. Raises WorkerLostError, and MeshError for one that is given up."""
        assert self._front is not None  # started
        if group not in self.groups:  # lost since it was opened
            raise WorkerLostError("the worker is gone", Fault.OTHERS)
        environment, now_s = self.groups[group][0], time.time()
        answer: asyncio.Future[EpisodeResult] = asyncio.get_running_loop().create_future()
        stage = RolloutStage(BEGINNING, now_s, StageKind.SETUP)
        self.rollouts[group, index] = Assigned(environment, answer, now_s, stage)
        self._front.send(FrameKind.PLAY, group, index)
        try:
            return await answer
        finally:
            self.rollouts.pop((group, index), None)

    def cancel(self, group: int, index: int) -> None:
        """Has it end a rollout, without waiting for that."""
        if self._front is not None:
            self._front.send(FrameKind.CANCEL, group, index)

    def give_up(self, group: int, index: int, why: str) -> None:
        """Fails a rollout as overdue, whatever the worker does."""
        self.rollouts[group, index].answer.set_exception(MeshError(Reason.DEADLINE_PASSED, why))
        self.cancel(group, index)

    def close_group(self, group: int) -> None:
        if self.groups.pop(group, None) is not None and self._front is not None:
            self._front.send(FrameKind.CLOSE, group)

    def stage(self, group: int, index: int) -> RolloutStage | None:
        """A rollout's reported stage."""
        assigned = self.rollouts.get((group, index))
        if assigned is None:
            return None
        worker, hold = f"worker {self.settings.number}", self.hold()
        if hold is not None:
            worker += f", held up by {hold.culprit.environment or 'nobody known'} in {hold.where}"
        return replace(assigned.stage, worker=worker)

    def lose(self, causes: dict[str, str], culprit: Culprit) -> None:
        """Fails all that waits for it, since it is lost; `causes` are the words for each environment."""
        waiting = [(assigned.environment, key, assigned.answer) for key, assigned in self.rollouts.items()]
        for group, opening in self._opening.items():
            waiting.append((self.groups[group][0], NO_ROLLOUT, opening))  # type: ignore[arg-type]  # only gets an error
        for environment, key, future in waiting:
            if not future.done():
                fault = culprit.fault_of(environment, key, causes)
                future.set_exception(WorkerLostError(causes[environment], fault))
        self.groups.clear()

    def leave_to(self, environment: str) -> None:
        """Has everything be played elsewhere that is not of this environment, whose code holds the worker up."""
        left = WorkerLostError(
            f"its worker {self.settings.number} is blocked by environment {environment}", Fault.OTHERS
        )
        for (group, index), assigned in list(self.rollouts.items()):
            if assigned.environment != environment and not assigned.answer.done():
                assigned.answer.set_exception(left)
                self.cancel(group, index)
        for group, opening in self._opening.items():
            if self.groups[group][0] != environment and not opening.done():
                opening.set_exception(left)
        for group in [group for group, (name, _) in self.groups.items() if name != environment]:
            self.close_group(group)

    def kill(self, why: str) -> None:
        """Ends the process and the programs that it started, at once."""
        self.ended_by = self.ended_by or why
        self._signal_group(alive=True)

    def stop(self) -> None:
        """Asks it to close its environments and exit."""
        self._asked_to_stop = True
        if self._front is not None:
            self._front.send(FrameKind.STOP)

    async def wait_gone(self) -> str:
        """Waits for its end; returns the cause. Nothing of it runs on afterwards."""
        await self.gone.wait()
        process = self._process
        if process is None:
            return "was never started"
        code = await asyncio.to_thread(exit_code, process, EXIT_CODE_S)
        self._signal_group(alive=code is None)  # what it started; and itself, where it only closed its socket
        if code is None:
            code = await asyncio.to_thread(exit_code, process, EXIT_CODE_S)
        await asyncio.to_thread(end_marked, WORKER_MARK, self.settings.mark)  # what it started in a session of its own
        self.close()
        return how_it_ended(code)

    def close(self) -> None:
        """Closes the sockets to a process that has been ended."""
        for channel in (self._front, self._alarm):
            if channel is not None:
                channel.close()

    def grown_mib(self) -> int:
        """Memory that it has taken since its environments were loaded, in MiB; 0 if the system does not report it."""
        return self._rss_mib() - self._loaded_mib

    def _rss_mib(self) -> int:
        try:
            with open(f"/proc/{self._pid}/statm") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
        except (OSError, IndexError):
            return 0

    @property
    def _pid(self) -> int:
        return (self._process.pid if self._process is not None else None) or 0

    def _signal_group(self, *, alive: bool) -> None:
        if not self._pid:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
            return
        if alive:  # it has not yet made a group of its own
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _on_frame(self, kind: FrameKind, group: int, index: int, payload: bytes) -> None:
        self.heard_s = time.monotonic()
        if kind is FrameKind.FINISHED:
            self._answer(group, index, unpack_rollouts(payload))
        elif kind is FrameKind.FAILED:
            self._answer(group, index, convert.from_proto(RolloutFailure, pb.RolloutFailure.FromString(payload)))
        elif kind is FrameKind.HEARTBEAT:
            self._held = None
            beat = Heartbeat.decode(payload)
            self.in_flight = dict(beat.in_flight)
            for number, place, stage in beat.stages:
                if (assigned := self.rollouts.get((number, place))) is not None:
                    assigned.stage = stage
        elif kind is FrameKind.OPENED:
            if (opening := self._opening.get(group)) is not None and not opening.done():
                opening.set_result(None)
        elif kind is FrameKind.REFUSED:
            if (opening := self._opening.get(group)) is not None and not opening.done():
                opening.set_exception(from_rpc_status(status_pb2.Status.FromString(payload)))
        elif kind is FrameKind.BLOCKED:
            self._held = (Hold.decode(payload), time.monotonic())
        elif kind is FrameKind.LEAVING:
            told = json.loads(payload)
            self.exiter = Culprit(told["environment"], tuple(told["rollout"]))
        elif kind is FrameKind.READY and not self.ready.done():
            listed = pb.ListEnvironmentsResponse.FromString(payload).environments
            self.infos = tuple(convert.from_proto(EnvironmentInfo, info) for info in listed)
            self._loaded_mib = self._rss_mib()
            self.ready.set_result(None)
        elif kind is FrameKind.UNUSABLE and not self.ready.done():
            self.ready.set_exception(ConfigError(payload.decode()))

    def _answer(self, group: int, index: int, played: EpisodeResult) -> None:
        assigned = self.rollouts.get((group, index))
        if assigned is not None and not assigned.answer.done():
            assigned.answer.set_result(played)
