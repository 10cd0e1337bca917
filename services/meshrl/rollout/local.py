"""Loads environments, the renderer and the model client in this process; a front does not need its heavy modules."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import AsyncExitStack
from functools import partial

from loguru import logger
from opentelemetry.trace import Tracer

from meshrl.rollout import hosting
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.engines.chat_servers import ChatServers
from meshrl.rollout.engines.model_client import EngineClient
from meshrl.rollout.engines.router import EngineRouter
from meshrl.rollout.episodes import EpisodePlayer
from meshrl.rollout.hosting import PolicyClient
from meshrl.rollout.rendering.renderer import PolicyRenderer, load_renderer
from meshrl.rollout.rendering.text_samples import TextSamples


async def open_players(
    config: RolloutConfig,
    names: Collection[str],
    servers: EngineRouter | ChatServers,
    stack: AsyncExitStack,
    tracer: Tracer,
) -> dict[str, EpisodePlayer]:
    """Raises ConfigError."""
    logging.getLogger("verifiers.v1").setLevel(config.vf_level.upper())
    client: PolicyClient
    text: TextSamples | None = None
    load = partial(load_renderer, config.tokenizer or config.model.name, config.renderer)
    if isinstance(servers, ChatServers):
        client = servers
        if config.text_samples:
            text = TextSamples(PolicyRenderer(await asyncio.to_thread(load)), seq_len=config.seq_len)
    else:
        renderer = await asyncio.to_thread(load, show_rows=config.show_rows)
        client = EngineClient(PolicyRenderer(renderer), servers, tracer, seq_len=config.seq_len)
    players: dict[str, EpisodePlayer] = {}
    for entry in config.env:
        if entry.resolved_name not in names:
            continue
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
        players[hosted.name] = EpisodePlayer(hosted, client, tracer, entry.deadlines, text=text)
        logger.info("environment {}: {} tasks", hosted.name, hosted.tasks.num_tasks or "infinitely many")
        if doubt := hosting.why_unrewarded(hosted.name, hosted.env.config):
            logger.warning("{}", doubt)
    return players
