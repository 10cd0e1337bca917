"""One worker process: plays rollouts of the environments that its front has it host, when the front calls it.

It calls engines itself, and has no limits of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import socket
import sys
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

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
from meshrl.core.waiting import beside
from meshrl.rollout.engines.capacity import RolloutLimit
from meshrl.rollout.engines.connect import connect_servers
from meshrl.rollout.groups import Admissions
from meshrl.rollout.local import open_players
from meshrl.rollout.runner import RolloutRunner
from meshrl.rollout.workers.link import FrameKind, Link
from meshrl.rollout.workers.outputs import take_over_output
from meshrl.rollout.workers.process import WorkerSettings
from meshrl.rollout.workers.watchdog import Watchdog, playing, report
from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason, to_rpc_status
from meshrl.wire.types import RolloutRequest

PR_SET_PDEATHSIG = 1
CLOSE_S = 5.0
STATUS_EVERY_S = 1.0
"""Seconds between its status messages, which show that its event loop runs."""
UNLIMITED = 2**31
"""The front sends only rollouts that may run."""


def main(link: socket.socket, reports: socket.socket, settings: WorkerSettings) -> None:
    os.setsid()  # programs that environments start are ended together with it,
    os.environ[WORKER_MARK] = settings.mark  # and those in sessions of their own are found by this
    _end_with_fork_server()
    end_with_parent(whole_group=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = settings.config
    layout = Layout(config.output_dir)
    take_over_output(settings.entries, settings.number, config.output_dir, config.log)
    raise_open_file_limit()
    name = f"rollout_worker_{settings.number}"
    tracing = setup_tracing(name, layout.traces, config.log.traces_max_mib)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    serving = loop.create_task(_serve(settings, link, reports, tracing))
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
    """Has the kernel kill this process when the fork server, and so the front, is gone, even while it is stuck in C."""
    if sys.platform != "linux":
        return
    # It lives for as long as one of its children holds this open, so we must not.
    fork_server: Any = forkserver._forkserver
    if fork_server._forkserver_alive_fd is not None:
        os.close(fork_server._forkserver_alive_fd)
        fork_server._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class FrontCalls:
    """The code of each call carries the name by which it is blamed, and its output sorted."""

    def __init__(self) -> None:
        self.link = Link(self._take)
        self._runner: RolloutRunner | None = None
        self._playing: dict[int, asyncio.Task[None]] = {}

    def begin(self, runner: RolloutRunner) -> None:
        self._runner = runner
        infos = [convert.to_proto(player.info) for player in runner.environments.values()]
        self.link.send(FrameKind.READY, 0, pb.ListEnvironmentsResponse(environments=infos).SerializeToString())

    async def report(self) -> None:
        assert self._runner is not None  # it has begun
        while True:
            await self.link.room.wait()
            self.link.send(FrameKind.STATUS, 0, convert.to_proto(self._runner.status()).SerializeToString())
            await asyncio.sleep(STATUS_EVERY_S)

    def _take(self, kind: FrameKind, number: int, message: bytes) -> None:
        if kind is FrameKind.PLAY:
            task = self._playing[number] = asyncio.create_task(self._play(number, message))
            task.add_done_callback(lambda _: self._playing.pop(number))
        elif number in self._playing:
            self._playing[number].cancel()

    async def _play(self, number: int, message: bytes) -> None:
        assert self._runner is not None  # the front calls it when it is ready
        request = convert.from_proto(RolloutRequest, pb.RunRolloutsRequest.FromString(message))
        with playing(request.environment, str(number)):
            try:
                await self.link.room.wait()
                await self._runner.run(request, partial(self.link.send, FrameKind.EVENT, number))
                self.link.send(FrameKind.END, number)
            except Exception as error:  # noqa: BLE001  # the boundary: whatever failed is the front's to know
                if not isinstance(error, MeshError):
                    logger.exception("a rollout of {} broke", request.environment)
                    error = MeshError(Reason.INTERNAL, f"{type(error).__name__}: {error}")
                self.link.send(FrameKind.REFUSED, number, to_rpc_status(error).SerializeToString())


async def _serve(settings: WorkerSettings, link: socket.socket, reports: socket.socket, tracer: Tracer) -> None:
    calls = FrontCalls()
    await asyncio.get_running_loop().create_connection(lambda: calls.link, sock=link)
    left = calls.link.left
    Watchdog(reports).start()
    config, log = settings.config, settings.config.log
    if log.metrics_port:  # the front has it
        log = log.model_copy(update={"metrics_port": 0})
    async with AsyncExitStack() as stack:
        waits, registry = waits_of(tracer), registry_of(tracer)
        name = f"rollout_worker_{settings.number}"
        stack.enter_context(observed(name, waits, registry, log, config.output_dir))
        try:
            servers = await connect_servers(
                config.client, config.engine_urls, config.weights, stack, tracer, first=settings.number - 1
            )
            players = await open_players(config, settings.names, servers, stack, tracer)
        except ConfigError as error:
            report(reports, "unusable", why=str(error))
            await asyncio.wait({left}, timeout=CLOSE_S)
            return
        table = Admissions(max_concurrent=UNLIMITED, max_queued=0, one_call_a_group=False)
        runner = RolloutRunner(players, table, servers, RolloutLimit(UNLIMITED))
        waits.count(runner.waits)
        waiting = runner.report_waits(lambda name, line: report(reports, "waiting", environment=name, line=line))
        freeze_loaded()
        _limit_memory(settings.max_memory_mib)
        calls.begin(runner)
        async with beside(waiting, calls.report()):
            await left
            await runner.drain(0.0)


def _limit_memory(max_memory_mib: int) -> None:
    """Makes one huge allocation a MemoryError of its code; the front sees slow growth."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    data_kib = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((max_memory_mib + data_kib // 1024) << 20, hard))
