"""Wires and runs the `rollout` program: config, environments, engines, server, drain."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from loguru import logger
from opentelemetry.trace import Tracer

from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.core.config import load_config
from meshrl.core.heap import freeze_loaded
from meshrl.core.program import run_program
from meshrl.core.readiness import say_ready
from meshrl.core.rpc.serve import GrpcServer
from meshrl.core.secret import read_secret
from meshrl.rollout import hosting
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.engines.capacity import RolloutLimit
from meshrl.rollout.engines.chat_servers import ChatServers
from meshrl.rollout.engines.engine_table import EngineTable, PolicyServers
from meshrl.rollout.engines.model_client import EngineClient
from meshrl.rollout.engines.rendering import PolicyRenderer, load_renderer
from meshrl.rollout.engines.router import Discovery, EngineRouter
from meshrl.rollout.engines.sessions import SessionBook
from meshrl.rollout.episodes import EpisodePlayer
from meshrl.rollout.group_runner import GroupRunner
from meshrl.rollout.groups import GroupTable
from meshrl.rollout.hosting import PolicyClient
from meshrl.rollout.service import RolloutServicer
from meshrl.v1 import rollout_pb2_grpc as pb_grpc

SERVICE = "meshrl.v1.RolloutService"
STOP_GRACE_S = 5.0


def main() -> None:
    """Entry point of the console scripts `rollout` and `env-server`."""
    config = load_config(RolloutConfig, prog="rollout")
    # Environments may have threads of their own kind of work: as many as Python gives them.
    run_program("rollout", config, serve, blocking_threads=None)


async def serve(config: RolloutConfig, stop: asyncio.Event, tracer: Tracer) -> int:
    """Serves until `stop` is set, then drains; returns the exit code. Raises ConfigError."""
    logging.getLogger("verifiers.v1").setLevel(config.vf_level.upper())
    server = GrpcServer(config.server)
    async with AsyncExitStack() as stack:
        runner = await build(config, stack, tracer)
        server.add(SERVICE, pb_grpc.add_RolloutServiceServicer_to_server, RolloutServicer(runner))
        port = await server.start()
        stack.push_async_callback(server.drain, STOP_GRACE_S)
        freeze_loaded()
        server.set_serving()
        say_ready()
        logger.info("serving {} on port {}", ", ".join(runner.environments), port)
        await stop.wait()
        logger.info("draining for up to {:g} s", config.drain_deadline_s)
        server.set_not_serving()
        await runner.drain(config.drain_deadline_s)
    return 0


async def build(config: RolloutConfig, stack: AsyncExitStack, tracer: Tracer) -> GroupRunner:
    """Loads renderer and environments and connects the engines; `stack` closes them. Raises ConfigError."""
    book = SessionBook()
    servers, client = await _policy(config, book, stack, tracer)
    environments: dict[str, EpisodePlayer] = {}
    for entry in config.env:
        defaults = entry.sampling.to_wire().over(config.sampling.to_wire())
        hosted = await asyncio.to_thread(
            hosting.load,
            entry,
            model=config.model.name,
            harness=config.harness,
            max_turns=config.max_turns,
            default_sampling=defaults,
        )
        await stack.enter_async_context(hosted.serving(client))
        environments[hosted.name] = EpisodePlayer(hosted, book, tracer)
        _log_to_file(hosted.name, config.output_dir)
        logger.info("environment {}: {} tasks", hosted.name, hosted.tasks.num_tasks or "infinitely many")
    limit = RolloutLimit(None if config.max_concurrent == "auto" else config.max_concurrent)
    table = GroupTable(max_concurrent=limit.rollouts, max_queued=config.max_queued)
    return GroupRunner(environments, table, servers, limit)


async def _policy(
    config: RolloutConfig, book: SessionBook, stack: AsyncExitStack, tracer: Tracer
) -> tuple[PolicyServers, PolicyClient]:
    """The servers that the policy is sampled from, and the client that does it. Raises ConfigError."""
    api_key = read_secret(
        "rollout.client.api_key", None, file=config.client.api_key_file, variable=config.client.api_key_var,
        environ=os.environ,
    )  # fmt: skip
    if config.client.api == "chat_completions":
        servers = await stack.enter_async_context(ChatServers(config.client, book, tracer, api_key=api_key))
        return servers, servers
    renderer = await asyncio.to_thread(load_renderer, config.tokenizer or config.model.name, config.renderer)
    engines = EngineTable([url.rstrip("/").removesuffix("/v1") for url in config.engine_urls], config.client.pool)
    discovery = await _discovery(config, stack)
    router = await stack.enter_async_context(EngineRouter(engines, config.client, api_key=api_key, discovery=discovery))
    return router, EngineClient(PolicyRenderer(renderer), router, book, tracer, seq_len=config.seq_len)


async def _discovery(config: RolloutConfig, stack: AsyncExitStack) -> Discovery | None:
    """Asks the weight hub for the engines it routes to, where one is configured."""
    if config.weights is None:
        return None
    options = ChannelOptions(unary_deadline_s=config.client.probe_deadline_s)
    hub = await stack.enter_async_context(WeightSyncClient(config.weights, options))

    async def engines() -> list[tuple[str, str]]:
        return [(engine.url.rstrip("/"), engine.engine_pool) for engine in await hub.list_engines() if engine.routable]

    return engines


def _log_to_file(environment: str, output_dir: Path) -> None:
    """Sends what is logged while an environment plays to its own file."""

    def belongs(record: Any) -> bool:
        return bool(record["extra"].get("env") == environment)

    path = output_dir / "logs" / "envs" / environment.replace("/", "_") / "env.log"
    logger.add(path, filter=belongs, level="DEBUG", delay=True)


if __name__ == "__main__":
    main()
