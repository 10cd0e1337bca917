"""One worker process: hosts environments and plays the rollouts that the service's front hands it.

The front sends frames with the rollouts to play. The worker plays with `local`, as a service without workers would,
calls engines itself, and sends back each rollout as the bytes that the service's caller will get. It ends when the
front ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import socket
import sys
import uuid
from contextlib import AsyncExitStack
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from google.rpc import status_pb2
from loguru import logger
from opentelemetry.trace import Tracer

from meshrl.core.config import ConfigError
from meshrl.core.heap import freeze_loaded
from meshrl.core.orphans import WORKER_MARK, end_with_parent
from meshrl.core.paths import Layout
from meshrl.core.program import raise_open_file_limit
from meshrl.core.telemetry.exposition import observed, registry_of
from meshrl.core.telemetry.tracing import setup_tracing
from meshrl.core.telemetry.waits import waits_of
from meshrl.rollout.deadlines.stages import RolloutStage
from meshrl.rollout.engines.capacity import EpisodeSizes
from meshrl.rollout.engines.connect import connect_servers
from meshrl.rollout.engines.engine_table import PolicyServers
from meshrl.rollout.engines.sessions import SessionBook
from meshrl.rollout.local import open_players
from meshrl.rollout.player import EpisodeResult, PlayableGroup, Player, SerializedRollouts
from meshrl.rollout.workers.frames import (
    HEARTBEAT_EVERY_S,
    Channel,
    FrameKind,
    Heartbeat,
    WorkerSettings,
    pack_rollouts,
)
from meshrl.rollout.workers.outputs import WorkerLogs, take_over_output
from meshrl.rollout.workers.watchdog import Watchdog, playing
from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason, to_rpc_status
from meshrl.wire.types import CONTRACT_VERSION, RolloutFailure, RolloutRequest

PR_SET_PDEATHSIG = 1
CLOSE_S = 5.0


def main(front: socket.socket, alarm: socket.socket, settings_text: str) -> None:
    """Runs a whole worker; the target of a process that a fork server starts."""
    settings = WorkerSettings.decode(settings_text)
    os.setsid()  # programs that environments start are ended together with it,
    os.environ[WORKER_MARK] = settings.mark  # and those in sessions of their own are found by this
    _end_with_fork_server()
    end_with_parent(whole_group=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = settings.config
    layout = Layout(config.output_dir)
    logs = WorkerLogs.of(config, settings.names, settings.number)
    take_over_output(logs, config.log)
    raise_open_file_limit()
    name = f"rollout_worker_{settings.number}"
    tracing = setup_tracing(name, layout.traces, config.log.traces_max_mib)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    serving = loop.create_task(_Worker(settings, tracing).serve(front, alarm))
    while True:
        try:
            loop.run_until_complete(serving)
            break
        except (SystemExit, KeyboardInterrupt) as left:
            if serving.done():
                break
            logger.warning("an environment's code raised {!r}; that is a failure of its rollout", left)
    tracing.close()
    sys.stdout.flush()
    os._exit(0)  # threads of an environment do not hold it up


def _end_with_fork_server() -> None:
    """Has the kernel kill this process when the fork server, and so the front, is gone: also one that is stuck in C."""
    if sys.platform != "linux":
        return
    # It lives for as long as one of its children holds this open, so we must not.
    fork_server: Any = forkserver._forkserver
    if fork_server._forkserver_alive_fd is not None:
        os.close(fork_server._forkserver_alive_fd)
        fork_server._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class _Worker:
    """The groups and rollouts of this process."""

    def __init__(self, settings: WorkerSettings, tracer: Tracer) -> None:
        self._settings = settings
        self._config = settings.config
        self._tracer = tracer
        self._stop = asyncio.Event()
        self._players: dict[str, Player] = {}
        self._groups: dict[int, tuple[str, PlayableGroup]] = {}
        self._rollouts: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._told: dict[tuple[int, int], RolloutStage] = {}
        self._front: Channel | None = None

    def _send(self, kind: FrameKind, group: int = 0, index: int = -1, payload: bytes = b"") -> None:
        assert self._front is not None  # it is served
        self._front.send(kind, group, index, payload)

    async def serve(self, front: socket.socket, alarm: socket.socket) -> None:
        self._front = await Channel.over(front, self._on_frame, self._stop.set)
        Watchdog(alarm).start()
        name, log = f"rollout_worker_{self._settings.number}", self._config.log
        if log.metrics_port:  # the front has it
            log = log.model_copy(update={"metrics_port": 0})
        async with AsyncExitStack() as stack:
            waits, registry = waits_of(self._tracer), registry_of(self._tracer)
            stack.enter_context(observed(name, waits, registry, log, self._config.output_dir))
            book = SessionBook()
            first = self._settings.number - 1
            try:
                servers = await connect_servers(self._config, book, stack, self._tracer, first=first)
                beating = asyncio.create_task(self._beat(servers))
                stack.callback(beating.cancel)
                self._players.update(
                    await open_players(self._config, self._settings.names, servers, book, stack, self._tracer)
                )
            except ConfigError as error:
                self._send(FrameKind.UNUSABLE, payload=str(error).encode())
                await asyncio.wait_for(self._stop.wait(), CLOSE_S)
                return
            freeze_loaded()
            _limit_memory(self._settings.max_memory_mib)
            infos = [convert.to_proto(player.info) for player in self._players.values()]
            listed = pb.ListEnvironmentsResponse(contract_version=CONTRACT_VERSION, environments=infos)
            self._send(FrameKind.READY, payload=listed.SerializeToString())
            await self._stop.wait()
            for task in (*self._opening.values(), *self._rollouts.values()):
                task.cancel()

    def _on_frame(self, kind: FrameKind, group: int, index: int, payload: bytes) -> None:
        if kind is FrameKind.PLAY:
            if group in self._groups:
                task = asyncio.create_task(self._play(group, index))
                self._rollouts[group, index] = task
        elif kind is FrameKind.OPEN:
            self._opening[group] = asyncio.create_task(self._open(group, payload))
        elif kind is FrameKind.CANCEL:
            if (playing_now := self._rollouts.get((group, index))) is not None:
                playing_now.cancel()
        elif kind is FrameKind.CLOSE:
            if (opening := self._opening.pop(group, None)) is not None:
                opening.cancel()
            if (opened := self._groups.pop(group, None)) is not None:
                opened[1].close()
        elif kind is FrameKind.STOP:
            self._stop.set()

    async def _open(self, group: int, payload: bytes) -> None:
        request = convert.from_proto(RolloutRequest, pb.RunRolloutsRequest.FromString(payload))
        try:
            with playing(request.environment):
                opened = await self._players[request.environment].open(request)
        except Exception as error:  # noqa: BLE001  # the taskset's own code may raise anything; the group is refused
            if not isinstance(error, MeshError):
                logger.exception("a task of {} cannot be made", request.environment)
                error = MeshError(Reason.ENVIRONMENT_FAILED, f"{type(error).__name__}: {error}")
            status: status_pb2.Status = to_rpc_status(error)
            self._send(FrameKind.REFUSED, group, payload=status.SerializeToString())
        else:
            self._groups[group] = (request.environment, opened)
            self._send(FrameKind.OPENED, group)
        finally:
            self._opening.pop(group, None)

    async def _play(self, group: int, index: int) -> None:
        environment, opened = self._groups[group]
        try:
            with playing(environment, (group, index)):
                played = await opened.play(index)
            self._answer(group, index, played)
        except Exception as error:  # noqa: BLE001  # the front waits for an answer, whatever it is
            logger.exception("rollout {} of a group of {} broke", index, environment)
            failure = pb.RolloutFailure(
                rollout_id=str(uuid.uuid4()), reason=Reason.INTERNAL.name, message=f"{type(error).__name__}: {error}"
            )
            self._send(FrameKind.FAILED, group, index, failure.SerializeToString())
        finally:
            self._rollouts.pop((group, index), None)
            self._told.pop((group, index), None)

    def _answer(self, group: int, index: int, played: EpisodeResult) -> None:
        if isinstance(played, RolloutFailure):
            failure = convert.to_proto(played)
            self._send(FrameKind.FAILED, group, index, failure.SerializeToString())
            return
        assert not isinstance(played, SerializedRollouts)  # this is where they are made
        messages = [part.SerializeToString() for rollout in played for part in convert.rollout_messages(rollout)]
        sizes = EpisodeSizes.of(played)
        self._send(FrameKind.FINISHED, group, index, pack_rollouts(SerializedRollouts(messages, sizes)))

    async def _beat(self, servers: PolicyServers) -> None:
        while True:
            stages = []
            for group, index in self._rollouts:
                opened = self._groups.get(group)
                stage = None if opened is None else opened[1].stage(index)
                if stage is not None and self._told.get((group, index)) != stage:
                    self._told[group, index] = stage
                    stages.append((group, index, stage))
            in_flight = {engine.url: engine.in_flight for engine in servers.engines.listed}
            self._send(FrameKind.HEARTBEAT, payload=Heartbeat(stages, in_flight).encode())
            await asyncio.sleep(HEARTBEAT_EVERY_S)


def _limit_memory(max_memory_mib: int) -> None:
    """Makes one huge allocation a MemoryError of the code that asks for it; what grows slowly the front sees."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    data_kib = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((max_memory_mib + data_kib // 1024) << 20, hard))
