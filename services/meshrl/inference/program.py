"""Runs the `inference` program: an engine, its HTTP server and, when weights are broadcast, its agent at the hub."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing, suppress

from aiohttp import web
from loguru import logger
from opentelemetry.trace import Tracer
from transformers import PreTrainedTokenizerBase

from meshrl.core.credentials.https import kept_fresh, scheme, server_context
from meshrl.core.credentials.secret import ADMIN_KEY, read_secret
from meshrl.core.heap import freeze_loaded
from meshrl.core.program import say_ready
from meshrl.core.rpc.serve import check_bind
from meshrl.core.telemetry.exposition import registry_of
from meshrl.core.telemetry.start import Start, start_of
from meshrl.core.telemetry.waits import waits_of
from meshrl.core.waiting import StoppedError, set_within, stop_or_first, unless_stopped
from meshrl.inference.agent.agent import Membership
from meshrl.inference.agent.ahead import VersionAhead
from meshrl.inference.agent.follower import HubFollower
from meshrl.inference.build import open_engine
from meshrl.inference.config import InferenceConfig
from meshrl.inference.engine import Engine
from meshrl.inference.http.app import InferenceServer
from meshrl.inference.http.chat_replies import ChatReplies
from meshrl.inference.http.metrics import EngineMetrics
from meshrl.inference.http.tokenizer import TextCodec
from meshrl.models.load import ModelError, load_tokenizer
from meshrl.wire.errors import MeshError

CLOSE_DEADLINE_S = 5.0
LOOK_S = 0.5
MIN_PROMPT_BYTES = 65536
BYTES_PER_TOKEN = 16  # no text has so many all through


class _Beside:
    def __init__(self, config: InferenceConfig, start: Start) -> None:
        self._config, self._start = config, start
        self._loading: asyncio.Task[tuple[PreTrainedTokenizerBase, ChatReplies | None] | None] | None = None
        self.ahead: VersionAhead | None = None

    def begin(self) -> None:
        config = self._config
        self._loading = asyncio.create_task(self._load())
        if config.weight_broadcast is not None:
            self.ahead = VersionAhead(config.weight_broadcast)
            self.ahead.begin()

    async def _load(self) -> tuple[PreTrainedTokenizerBase, ChatReplies | None] | None:
        with self._start.phase("tokenizer"):
            try:
                tokenizer = await asyncio.to_thread(load_tokenizer, self._config.model)
            except ModelError as error:  # the token-in route works without one
                logger.warning("no tokenizer, so only /inference/v1/generate is served: {}", error)
                return None
            return tokenizer, await asyncio.to_thread(ChatReplies.load, tokenizer, self._config.renderer)

    async def codec(self, max_model_len: int) -> TextCodec | None:
        """None for a model without a tokenizer. Raises as `ChatReplies.load`."""
        assert self._loading is not None, "it was begun"
        loaded, config = await self._loading, self._config
        if loaded is None:
            return None
        tokenizer, replies = loaded
        return TextCodec(
            tokenizer,
            replies=replies,
            max_prompt_bytes=config.max_prompt_bytes or max(MIN_PROMPT_BYTES, BYTES_PER_TOKEN * max_model_len),
            trust_request_chat_template=config.trust_request_chat_template,
        )

    async def aclose(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        if self.ahead is not None:
            await self.ahead.close()


async def serve(config: InferenceConfig, stop: asyncio.Event, tracer: Tracer) -> int:
    """Drains once `stop` is set; returns the exit code. Raises ConfigError for a bind or key that is not allowed."""
    tls = server_context()
    check_bind(config.server, encrypted=tls is not None)
    api_key = read_secret(
        "inference.api_key", config.api_key, file=config.api_key_file, variable=config.api_key_var, environ=os.environ
    )
    async with aclosing(_Beside(config, start_of(tracer))) as beside:
        try:
            with waits_of(tracer).waiting("start", f"its engine of {config.model.name} to come up"):
                opening = open_engine(config, start_of(tracer), meanwhile=beside.begin)
                engine = await unless_stopped(stop, opening)
            codec = await beside.codec(engine.max_model_len)
        except StoppedError:  # a large model takes minutes, and a stop need not wait for it
            return 0
        except (ModelError, ValueError) as error:  # a configuration that no retry mends: one line, no traceback
            logger.error("{}", error)
            return 2
        membership = Membership(
            engine_id=config.engine_id,
            engine_pool=config.engine_pool,
            broadcast=config.weight_broadcast,
        )
        follower = HubFollower(engine, membership, url=config.url or "", waits=waits_of(tracer), ahead=beside.ahead)
        server = InferenceServer(
            engine,
            model_name=config.served_model_name or config.model.name,
            codec=codec,
            base_model=config.model.name,
            request_deadline_s=config.request_deadline_s,
            api_key=api_key,
            admin_key=os.environ.get(ADMIN_KEY),
            follower=follower,
        )
        runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None)
        await runner.setup()
        freeze_loaded()
        site = web.TCPSite(runner, config.server.host, config.server.port, backlog=1024, ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            logger.error("cannot listen on {}:{}: {}; set server.port", config.server.host, config.server.port, error)
            await engine.close()
            await runner.cleanup()
            return 2
        host, port = runner.addresses[0][:2]
        waits_of(tracer).serves = (f"{host}:{port}",)
        logger.info(
            "serving {} on {}://{}:{} ({} slots of {} tokens)",
            config.model.name, scheme(), host, port, engine.stats().slots, engine.max_model_len,
        )  # fmt: skip
        registry_of(tracer).register(EngineMetrics(engine))
        say_ready(tracer)
        async with kept_fresh(tls), server.idle.closed(runner):
            code = await _until_stopped(engine, follower, f"{host}:{port}", stop)
        engine.begin_drain()
        logger.info("draining {} requests in flight", engine.in_flight)
        await engine.close(config.drain_deadline_s)
        await runner.cleanup()
        return code


async def _until_stopped(engine: Engine, follower: HubFollower, address: str, stop: asyncio.Event) -> int:
    following = asyncio.create_task(follower.run(address, stop))
    watch = asyncio.create_task(_until_lost(engine, stop))
    await stop_or_first(stop, following, watch)
    if stop.is_set():
        with suppress(TimeoutError, asyncio.CancelledError, MeshError):  # leaving anyway; the hub's lease runs out
            await asyncio.wait_for(following, 2 * CLOSE_DEADLINE_S)
        return 0
    if following.done():
        logger.error("the weight agent ended: {}", following.exception() or "no reason given")
    for task in (following, watch):
        task.cancel()
    return 1


async def _until_lost(engine: Engine, stop: asyncio.Event) -> int:
    while not stop.is_set():
        if engine.lost is not None:
            logger.error("the engine is lost: {}", engine.lost)
            return 1
        await set_within(stop, LOOK_S)
    return 0
