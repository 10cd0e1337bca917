"""Wires and runs the `orchestrator` program: clients, ledger, monitor, loop, and a clean end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from loguru import logger
from opentelemetry.trace import Tracer

from meshrl.core.config import ConfigError, load_config
from meshrl.core.paths import Layout
from meshrl.core.readiness import say_ready
from meshrl.core.rpc.serve import GrpcServer, run
from meshrl.core.telemetry.logs import setup_logging
from meshrl.core.telemetry.monitor import ConsoleSink, JsonlSink, Monitor, Sink, WandbSink
from meshrl.core.telemetry.tracing import setup_tracing
from meshrl.orchestrator.build import build_loop
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.ledger.open_run import open_journal
from meshrl.orchestrator.peers.connect import Mesh, Services, connect, wait_for_services
from meshrl.orchestrator.reports.bench_table import summary_table
from meshrl.sampling.retry import RunError

HEALTH_NAME = "meshrl.Orchestrator"
CLOSE_DEADLINE_S = 10.0

T = TypeVar("T")


def main() -> None:
    """Entry point of the console script `orchestrator`."""
    config = load_config(OrchestratorConfig, prog="orchestrator")
    layout = Layout(config.output_dir)
    setup_logging("orchestrator", config.log.level, layout.log("orchestrator"), json_logging=config.log.json_logging)
    tracing = setup_tracing("orchestrator", layout.traces, config.log.traces_max_mib)
    try:
        code = run(lambda stop: orchestrate(config, stop, tracing))
    finally:
        tracing.close()
    raise SystemExit(code)


async def orchestrate(config: OrchestratorConfig, stop: asyncio.Event, tracer: Tracer) -> int:
    """Trains until the last step or until `stop` is set; returns 0, or 1 when the run could not go on.

    Raises ConfigError when there is nothing to train on.
    """
    if not config.train.env:
        raise ConfigError(
            "orchestrator.train.env must name at least one environment, got none;"
            " add [[train.env]] with id = '<taskset>' to its TOML file ([[orchestrator.train.env]] for rl)"
        )
    server = GrpcServer(config.server) if config.server is not None else None
    services = connect(config)
    try:
        if server is not None:
            server.add(HEALTH_NAME, _no_methods, None)
            logger.info(f"health of the orchestrator on port {await server.start()}")
            server.set_serving()
        met = await _until(stop, wait_for_services(config, services))
        if met is not None:
            await _train(config, services, met[0], tracer, stop)
    except RunError as error:  # said once, without a traceback: the message tells what to change
        logger.error(str(error))
        return 1
    finally:
        await services.close()
        if server is not None:
            await server.drain(grace_s=0.0)
    return 0


async def _train(
    config: OrchestratorConfig, services: Services, mesh: Mesh, tracer: Tracer, stop: asyncio.Event
) -> None:
    layout = Layout(config.output_dir)
    journal = await asyncio.to_thread(open_journal, config, mesh.trainer, mesh.run)
    monitor = await asyncio.to_thread(open_monitor, config, layout)
    try:
        loop = build_loop(config, services, mesh, journal=journal, monitor=monitor, tracer=tracer)
        say_ready()
        if await _until(stop, loop.train()) is None:
            logger.info(f"stopped before step {loop.run.plan.next_step} was complete")
        else:
            logger.success(f"trained up to step {loop.run.plan.next_step - 1}")
        journal.end()  # not after an error: whoever is started next goes on with what is open
        if config.bench:
            logger.info("bench:\n" + summary_table(loop.finisher.records))
    finally:
        logger.info(f"rollouts: {journal.balance()}")
        await asyncio.to_thread(journal.close)
        await asyncio.to_thread(monitor.close)


def _no_methods(servicer: object, server: object) -> None:
    """The orchestrator serves health alone."""


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> tuple[T] | None:
    """The result of `work` in a tuple, or None when `stop` came first; `work` is cancelled and awaited then."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return (working.result(),)
        logger.info("stopping: cancelling what is in flight")
        return None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait({working, stopping}, timeout=CLOSE_DEADLINE_S)


def open_monitor(config: OrchestratorConfig, layout: Layout) -> Monitor:
    """Console and JSONL always; W&B when configured."""
    sinks: list[Sink] = [ConsoleSink(), JsonlSink(layout.metrics_jsonl)]
    if config.wandb is not None:
        sinks.append(
            WandbSink(
                project=config.wandb.project,
                name=config.wandb.name,
                group=config.wandb.group,
                tags=config.wandb.tags,
                offline=config.wandb.offline,
                folder=Path(config.output_dir),
                settings=config.model_dump(mode="json"),
            )
        )
    return Monitor(sinks)


if __name__ == "__main__":
    main()
