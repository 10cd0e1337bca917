"""The `rollout` program: connects engines, loads environments, serves RolloutService or dials out, and drains."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from loguru import logger
from opentelemetry.trace import Tracer

from meshrl.client.names import named_by_host
from meshrl.client.trust import Role
from meshrl.core.config import load_config
from meshrl.core.credentials.identity import as_member
from meshrl.core.heap import freeze_loaded, loading
from meshrl.core.orphans import children_end_too
from meshrl.core.private_folders import short_socket_paths
from meshrl.core.program import run_program, say_ready
from meshrl.core.rpc.serve import GrpcServer
from meshrl.core.telemetry.exposition import registry_of
from meshrl.core.telemetry.start import start_of
from meshrl.core.telemetry.waits import waits_of
from meshrl.core.waiting import beside, stop_or_first
from meshrl.environments.plugins import NAMESAKES
from meshrl.prime_rl import PrimeRLKeys
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.engines.capacity import RolloutLimit
from meshrl.rollout.engines.connect import connect_servers
from meshrl.rollout.exchange.spool import ResultSpool
from meshrl.rollout.exchange.worker import ExchangeWorker
from meshrl.rollout.groups import Admissions
from meshrl.rollout.metrics import RolloutMetrics
from meshrl.rollout.player import Player
from meshrl.rollout.runner import RolloutRunner
from meshrl.rollout.service import SERVICE, RolloutServicer, add_to_server
from meshrl.rollout.workers.fleet import PooledPlayer, WorkerFleet
from meshrl.rollout.workers.outputs import log_environments

STOP_GRACE_S = 5.0
DELIVER_S = 10.0
"""Seconds for the orchestrator to acknowledge results after a drain; the rest stays in the spool."""


def main() -> None:
    config = load_config(RolloutConfig, prog="rollout", spellings=PrimeRLKeys(RolloutConfig, "rollout"))
    with short_socket_paths(), children_end_too():  # the tool servers and sandboxes of environments
        # Environments may have threads of their own kind of work: as many as Python gives them.
        run_program("rollout", config, as_member(Role.ROLLOUT, serve), blocking_threads=None)


async def serve(config: RolloutConfig, stop: asyncio.Event, tracer: Tracer) -> int:
    """Until `stop` is set; then drains. Returns the exit code. Raises ConfigError."""
    exchange = config.exchange
    async with AsyncExitStack() as stack:
        if exchange is not None:
            name = exchange.name or named_by_host()
            spool = ResultSpool(exchange.spool or config.output_dir / "exchange" / f"{name}.sqlite")
            stack.callback(spool.close)
            runner = await build(config, stack, tracer)
            worker = ExchangeWorker(exchange, runner, spool, name=name, max_queued=config.max_queued)
            waits_of(tracer).count(worker.waits)
            serving = _dial(worker, exchange.address, runner, stop, config.drain_deadline_s, tracer)
        else:
            server = GrpcServer(config.server)
            runner = await build(config, stack, tracer)
            server.add(SERVICE, add_to_server, RolloutServicer(runner, on_drained=stop.set))
            port = await server.start()
            waits_of(tracer).serves = (f"{config.server.host}:{port}",)
            stack.push_async_callback(server.drain, STOP_GRACE_S)
            serving = _listen(server, port, runner, stop, config.drain_deadline_s, tracer)
        waits_of(tracer).count(runner.waits)
        freeze_loaded()
        async with beside(runner.report_waits()):
            await serving
    return 0


async def _listen(
    server: GrpcServer, port: int, runner: RolloutRunner, stop: asyncio.Event, drain_s: float, tracer: Tracer
) -> None:
    server.set_serving()
    say_ready(tracer)
    logger.info("serving {} on port {}", ", ".join(runner.environments), port)
    await stop.wait()
    logger.info("draining for up to {:g} s", drain_s)
    server.set_not_serving()
    await runner.drain(drain_s)


async def _dial(
    worker: ExchangeWorker, address: str, runner: RolloutRunner, stop: asyncio.Event, drain_s: float, tracer: Tracer
) -> None:
    running = asyncio.create_task(worker.run())
    try:
        say_ready(tracer)
        logger.info("worker {!r} plays {} for {}", worker.name, ", ".join(runner.environments), address)
        await stop_or_first(stop, running)
        if running.done():
            running.result()
        logger.info("draining for up to {:g} s", drain_s)
        draining = asyncio.create_task(runner.drain(drain_s))
        await asyncio.sleep(0)  # it says that it drains from here on
        worker.beat_now()
        await draining
        if worker.attached.is_set():
            await worker.delivered(DELIVER_S)
    finally:
        running.cancel()
        await asyncio.wait({running})


async def build(config: RolloutConfig, stack: AsyncExitStack, tracer: Tracer) -> RolloutRunner:
    """`stack` closes engines and players. Raises ConfigError."""
    log_environments(config.env, config.output_dir)
    servers = await connect_servers(config.client, config.engine_urls, config.weights, stack, tracer)
    limit = RolloutLimit(None if config.max_concurrent == "auto" else config.max_concurrent)
    table = Admissions(
        max_concurrent=limit.rollouts, max_queued=config.max_queued, max_per_run=config.max_concurrent_per_run
    )
    registry_of(tracer).register(RolloutMetrics(table))
    loading_them = f"its environments {', '.join(entry.resolved_name for entry in config.env)} to be loaded"
    with waits_of(tracer).waiting("start", loading_them), start_of(tracer).phase("environments"):
        fleet = await stack.enter_async_context(WorkerFleet(config))
    players: dict[str, Player] = {name: PooledPlayer(fleet, name, config.client.failover_s) for name in fleet.names}
    for name in fleet.names:
        tasks = fleet.info(name).num_tasks or "infinitely many"
        logger.bind(env=name).info("environment {}: {} tasks, played by {}", name, tasks, fleet.workers_of(name))
    for entry in config.env:
        if entry.id in NAMESAKES:
            logger.info("environment {}: {!r} is {}", entry.resolved_name, entry.id, NAMESAKES[entry.id])
    names = [entry.resolved_name for entry in config.env]
    if here := [name for name in names if name not in players]:
        with loading():
            from meshrl.rollout.local import open_players  # imports verifiers, which takes seconds

        players |= await open_players(config, here, servers, stack, tracer)
    return RolloutRunner({name: players[name] for name in names}, table, servers, limit, in_flight=fleet.in_flight)


if __name__ == "__main__":
    main()
