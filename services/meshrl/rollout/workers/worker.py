"""One worker process: a rollout service on a Unix socket, for the environments that its front has it host.

It is the same service as that of a program without workers: it plays with `local` and calls engines itself. The front
calls it for each rollout, and passes its answers on as they are. It has no limits of its own, and ends when the front
ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import grpc.aio
from loguru import logger
from opentelemetry.trace import NoOpTracer, Tracer

from meshrl.client.credentials import INSECURE
from meshrl.core.config import ConfigError
from meshrl.core.heap import freeze_loaded
from meshrl.core.orphans import WORKER_MARK, end_with_parent
from meshrl.core.paths import Layout
from meshrl.core.program import raise_open_file_limit
from meshrl.core.rpc.serve import GrpcServer, UnixSocket
from meshrl.core.telemetry.exposition import observed, registry_of
from meshrl.core.telemetry.tracing import setup_tracing
from meshrl.core.telemetry.waits import waits_of
from meshrl.rollout.engines.capacity import RolloutLimit
from meshrl.rollout.engines.connect import connect_servers
from meshrl.rollout.engines.sessions import SessionBook
from meshrl.rollout.group_runner import GroupRunner
from meshrl.rollout.groups import GroupTable
from meshrl.rollout.local import open_players
from meshrl.rollout.service import SERVICE, RolloutServicer, add_to_server
from meshrl.rollout.workers.outputs import WorkerLogs, take_over_output
from meshrl.rollout.workers.process import WorkerSettings
from meshrl.rollout.workers.watchdog import Watchdog, playing, report
from meshrl.v1 import rollout_pb2 as pb

PR_SET_PDEATHSIG = 1
CLOSE_S = 5.0
UNLIMITED = 2**31
"""Rollouts at once: the front sends those alone that may run."""


def main(reports: socket.socket, settings_text: str) -> None:
    """Runs a whole worker; the target of a process that a fork server starts."""
    settings = WorkerSettings.decode(settings_text)
    os.setsid()  # programs that environments start are ended together with it,
    os.environ[WORKER_MARK] = settings.mark  # and those in sessions of their own are found by this
    _end_with_fork_server()
    end_with_parent(whole_group=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = settings.config
    layout = Layout(config.output_dir)
    logs = WorkerLogs.of(settings.entries, settings.number, config.output_dir)
    take_over_output(logs, config.log)
    raise_open_file_limit()
    name = f"rollout_worker_{settings.number}"
    tracing = setup_tracing(name, layout.traces, config.log.traces_max_mib)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    serving = loop.create_task(_serve(settings, reports, tracing))
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


class _WorkerServicer(RolloutServicer):
    """The service, with a name on each call's code: whose it is that blocks the loop, prints or ends the process."""

    async def RunRollouts(  # noqa: N802  # the name of the RPC
        self, request: pb.RunRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.RunRolloutsResponse | bytes, None]:
        with playing(request.environment, request.request_id):
            async with aclosing(super().RunRollouts(request, context)) as events:
                async for event in events:
                    yield event


async def _serve(settings: WorkerSettings, reports: socket.socket, tracer: Tracer) -> None:
    """Serves until the front closes its end of `reports`."""
    front, _ = await asyncio.open_connection(sock=reports)
    left = asyncio.create_task(front.read())
    Watchdog(reports).start()
    config, log = settings.config, settings.config.log
    if log.metrics_port:  # the front has it
        log = log.model_copy(update={"metrics_port": 0})
    async with AsyncExitStack() as stack:
        waits, registry = waits_of(tracer), registry_of(tracer)
        name = f"rollout_worker_{settings.number}"
        stack.enter_context(observed(name, waits, registry, log, config.output_dir))
        book = SessionBook()
        try:
            servers = await connect_servers(
                config.client, config.engine_urls, config.weights, book, stack, tracer, first=settings.number - 1
            )
            players = await open_players(config, settings.names, servers, book, stack, tracer)
        except ConfigError as error:
            report(reports, "unusable", why=str(error))
            await asyncio.wait({left}, timeout=CLOSE_S)
            return
        table = GroupTable(max_concurrent=UNLIMITED, max_queued=0, one_call_a_group=False)
        runner = GroupRunner(players, table, servers, RolloutLimit(UNLIMITED))
        server = GrpcServer(UnixSocket(settings.socket), credentials=INSECURE, tracer=NoOpTracer())
        server.add(SERVICE, add_to_server, _WorkerServicer(runner))
        await server.start()
        stack.push_async_callback(server.drain, 0.0)
        waits.count(runner.waits)
        waiting = asyncio.create_task(
            runner.report_waits(lambda name, line: report(reports, "waiting", environment=name, line=line))
        )
        stack.callback(waiting.cancel)
        freeze_loaded()
        _limit_memory(settings.max_memory_mib)
        server.set_serving()
        report(reports, "ready")
        await left


def _limit_memory(max_memory_mib: int) -> None:
    """Makes one huge allocation a MemoryError of the code that asks for it; what grows slowly the front sees."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    data_kib = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((max_memory_mib + data_kib // 1024) << 20, hard))
