"""The front's side of one worker process: starts it, has it play rollouts, and ends it.

It is called over `link`, once for each rollout. Reports that its event loop cannot make come as one JSON object a line
over another socket pair: that it is unusable or blocked, and whose code ends it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from google.rpc import status_pb2

from meshrl.core.config import ConfigError
from meshrl.core.config.shared import EnvConfig
from meshrl.core.orphans import WORKER_MARK, end_marked
from meshrl.core.program import how_it_ended
from meshrl.core.waiting import stop_or_first
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.rendering.tokenizer_folders import known_class
from meshrl.rollout.trouble_log import log_waiting
from meshrl.rollout.workers.blame import NOBODY, Culprit, Fault
from meshrl.rollout.workers.link import FrameKind, Link
from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire import convert
from meshrl.wire.errors import from_rpc_status
from meshrl.wire.types import EnvironmentInfo

PRELOADED = "meshrl.rollout.workers.preload"
ANY_TOKENIZER = "meshrl.rollout.workers.preload_tokenizers"
EXIT_CODE_S = 5.0
ALARM_IS_FRESH_S = 2.0


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Worker `number` hosts the environments `names` of `config`."""

    number: int
    config: RolloutConfig
    names: Sequence[str] = ()
    max_memory_mib: int = 0
    mark: str = ""
    """In the environment variables of every process that the worker starts, so that they can be found and ended."""

    @property
    def entries(self) -> list[EnvConfig]:
        return [entry for entry in self.config.env if entry.resolved_name in self.names]


class WorkerLostError(Exception):
    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True)
class Hold:
    """The code of `culprit` at `where` holds a worker's event loop up."""

    culprit: Culprit
    where: str
    seconds: float


@dataclass
class WorkerCall:
    """A rollout that a worker plays; it has all its messages once it has `ended`."""

    environment: str
    messages: list[bytes] = field(default_factory=list)
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


_ONE_AT_A_TIME = threading.Lock()
"""multiprocessing reads the exit codes of all its children whenever it starts one, which only one thread may do."""


def new_process(pair: tuple[socket.socket, socket.socket], settings: WorkerSettings) -> BaseProcess:
    """Blocks. The first worker waits seconds for a fork server's imports, later ones take milliseconds. Without fork
    servers each imports for itself."""
    method = "forkserver" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        config = settings.config
        known = known_class(config.tokenizer or config.model.name) is not None
        multiprocessing.set_forkserver_preload([PRELOADED] if known else [PRELOADED, ANY_TOKENIZER])
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # typeshed has it on each kind of context
        target=run_worker, args=(*pair, settings), name=f"rollout-worker-{settings.number}"
    )
    with _ONE_AT_A_TIME:
        process.start()
    return process


def exit_code(process: BaseProcess, deadline_s: float) -> int | None:
    wait([process.sentinel], deadline_s)
    with _ONE_AT_A_TIME:
        return process.exitcode


def run_worker(link: socket.socket, reports: socket.socket, settings: WorkerSettings) -> None:
    from meshrl.rollout.workers import worker

    worker.main(link, reports, settings)


class WorkerProcess:
    """Use from one event loop."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = replace(settings, mark=secrets.token_hex(16))
        self.infos: tuple[EnvironmentInfo, ...] = ()
        self.in_flight: Mapping[str, int] = {}
        self.calls: dict[int, WorkerCall] = {}
        self.load = 0
        """Rollouts of the groups that are played here."""
        self.heard_s = time.monotonic()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        """The process has ended, or is about to."""
        self.exiter = NOBODY
        self.ended_by = ""
        """Why the front ended it; "" if it did not."""
        self._held: tuple[Hold, float] | None = None
        self._process: BaseProcess | None = None
        self._numbers = itertools.count(1)
        self._link = Link(self._take)
        self._reports: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._asked_to_stop = False
        self._loaded_mib = 0

    async def start(self) -> None:
        """`ready` returns when the environments are loaded, or why they cannot be (ConfigError)."""
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)

        def close(*ends: socket.socket) -> None:
            for end in ends:
                end.close()

        def abandon(started: asyncio.Future[BaseProcess]) -> None:
            close(*ours, *theirs)
            if not started.cancelled() and started.exception() is None:
                started.result().kill()

        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(None, new_process, theirs, self.settings)
        try:
            self._process = await asyncio.shield(starting)
        except BaseException:  # a thread cannot be stopped: what it starts is ended when it has been started
            starting.add_done_callback(abandon)
            self.gone.set()
            raise
        close(*theirs)
        link, reports = ours
        await loop.create_connection(lambda: self._link, sock=link)
        lines, self._reports = await asyncio.open_connection(sock=reports)
        self._reading = asyncio.create_task(self._read(lines))
        self.heard_s = time.monotonic()

    @property
    def usable(self) -> bool:
        return self.ready.done() and not self.gone.is_set() and not self.ended_by and not self._asked_to_stop

    def hold(self) -> Hold | None:
        """By its own report."""
        if self._held is None:
            return None
        hold, said_s = self._held
        since_s = time.monotonic() - said_s
        return replace(hold, seconds=hold.seconds + since_s) if since_s < ALARM_IS_FRESH_S else None

    async def play(self, environment: str, request: pb.RunRolloutsRequest) -> list[bytes]:
        """Plays a group of one rollout; returns its stream, the summary last. Raises the worker's MeshError, and
        WorkerLostError if it is lost, or left to another environment."""
        number, call = next(self._numbers), WorkerCall(environment)
        self.calls[number] = call
        try:
            if not self._link.room.is_set():  # it has not taken what it was sent
                await stop_or_first(self._link.room, call.ended)
            if not call.ended.done():
                self._link.send(FrameKind.PLAY, number, request.SerializeToString())
            await call.ended
            return call.messages
        except BaseException:
            self._link.send(FrameKind.CANCEL, number)
            raise
        finally:
            del self.calls[number]

    def lose(self, causes: Mapping[str, str], culprit: Culprit) -> None:
        for number, call in self.calls.items():
            fault = culprit.fault_of(call.environment, str(number), causes)
            call.fail(WorkerLostError(causes[call.environment], fault))

    def leave_to(self, environment: str) -> None:
        """Its code holds the worker up; all else moves."""
        words = f"its worker {self.settings.number} is blocked by environment {environment}"
        for call in self.calls.values():
            if call.environment != environment:
                call.fail(WorkerLostError(words, Fault.OTHERS))

    def kill(self, why: str) -> None:
        self.ended_by = self.ended_by or why
        self._signal_group(alive=True)

    def stop(self) -> None:
        self._asked_to_stop = True
        self._link.close()

    async def wait_gone(self) -> str:
        """Returns the cause of its end. Its children have ended too."""
        await self.gone.wait()
        process = self._process
        if process is None:
            return "was never started"
        code = await asyncio.to_thread(exit_code, process, EXIT_CODE_S)
        self._signal_group(alive=code is None)  # what it started; and itself, where it only closed its socket
        if code is None:
            code = await asyncio.to_thread(exit_code, process, EXIT_CODE_S)
        await asyncio.to_thread(end_marked, WORKER_MARK, self.settings.mark)  # what it started in a session of its own
        return how_it_ended(code)

    def close(self) -> None:
        for call in self.calls.values():
            call.fail(WorkerLostError(f"worker {self.settings.number} was closed", Fault.UNKNOWN))
        if self._reading is not None:
            self._reading.cancel()
        self._link.close()
        if self._reports is not None:
            self._reports.close()

    def grown_mib(self) -> int:
        """Memory taken since the environments were loaded; 0 if the system does not report it."""
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

    def _take(self, kind: FrameKind, number: int, message: bytes) -> None:
        self.heard_s = time.monotonic()
        call = self.calls.get(number)
        match kind:
            case FrameKind.EVENT if call is not None:
                call.messages.append(message)
            case FrameKind.END if call is not None and not call.ended.done():
                call.ended.set_result(None)
            case FrameKind.REFUSED if call is not None:
                call.fail(from_rpc_status(status_pb2.Status.FromString(message)))
            case FrameKind.STATUS:
                self._held = None
                status = pb.GetRolloutStatusResponse.FromString(message)
                self.in_flight = {engine.url: engine.in_flight for engine in status.engines}
            case FrameKind.READY if not self.ready.done():
                found = pb.ListEnvironmentsResponse.FromString(message).environments
                self.infos = tuple(convert.from_proto(EnvironmentInfo, info) for info in found)
                self._loaded_mib = self._rss_mib()
                self.ready.set_result(None)

    async def _read(self, reports: asyncio.StreamReader) -> None:
        try:
            async for line in reports:
                self.heard_s = time.monotonic()
                self._learn(json.loads(line))
        except (OSError, ValueError):  # it ended in the middle of a line
            pass
        finally:
            self.gone.set()

    def _learn(self, said: Mapping[str, object]) -> None:
        match said:
            case {"kind": "blocked", "where": str(where), "seconds": float(seconds)}:
                self._held = Hold(_culprit(said), where, seconds), time.monotonic()
            case {"kind": "leaving"}:
                self.exiter = _culprit(said)
            case {"kind": "waiting", "environment": str(name), "line": str(line)}:
                log_waiting(name, f"{line} (worker {self.settings.number})")
            case {"kind": "unusable", "why": str(why)} if not self.ready.done():
                self.ready.set_exception(ConfigError(why))


def _culprit(said: Mapping[str, object]) -> Culprit:
    return Culprit(str(said["environment"]), str(said["rollout"]))
