"""Connects front and workers to the policy's servers, by configuration and weight hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

import aiohttp
from opentelemetry.trace import Tracer

from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.core.config import ConfigError
from meshrl.core.credentials.secret import read_secret
from meshrl.core.rpc.engine_http import engine_session
from meshrl.rollout.config import ClientConfig
from meshrl.rollout.engines.engine_table import EngineTable
from meshrl.rollout.engines.keys import why_locked_out
from meshrl.rollout.engines.router import Discovery, EngineRouter
from meshrl.wire.errors import MeshError

if TYPE_CHECKING:
    from meshrl.rollout.engines.chat_servers import ChatServers


async def connect_servers(
    client: ClientConfig,
    urls: Sequence[str],
    hub_address: str | None,
    stack: AsyncExitStack,
    tracer: Tracer,
    *,
    first: int = 0,
) -> EngineRouter | ChatServers:
    """Uses the engines at `urls` and those of the hub. Raises ConfigError for a key without a file, and if every engine
    refuses the key. Among equally busy engines the one at place `first` comes first, so that workers begin at different
    ones."""
    api_key = read_secret(
        "rollout.client.api_key", None, file=client.api_key_file, variable=client.api_key_var,
        environ=os.environ,
    )  # fmt: skip
    if client.api == "chat_completions":
        from meshrl.rollout.engines.chat_servers import ChatServers, api_url  # imports verifiers, which takes seconds

        await _refuse_without_key(client, list(map(api_url, client.base_url)), api_key)
        servers = ChatServers(client, tracer, api_key=api_key)
        stack.push_async_callback(servers.close)
        return servers
    known = [url.rstrip("/").removesuffix("/v1") for url in urls]
    turned = first % len(known) if known else 0
    engines = EngineTable([*known[turned:], *known[:turned]], client.pool)
    hub: WeightSyncClient | None = None
    if hub_address is not None:
        options = ChannelOptions(unary_deadline_s=client.probe_deadline_s)
        hub = await stack.enter_async_context(WeightSyncClient(hub_address, options))
    router = EngineRouter(engines, client, api_key=api_key, discovery=None if hub is None else _routable(hub))
    await stack.enter_async_context(router)
    if hub is not None:
        with suppress(MeshError):  # a hub that is away has told the router so
            known += [engine.url.rstrip("/") for engine in await hub.list_engines()]  # also those without a version yet
    await _refuse_without_key(client, [f"{url}/v1" for url in known], api_key)
    return router


async def _refuse_without_key(config: ClientConfig, apis: Sequence[str], api_key: str | None) -> None:
    """A server that does not answer may take the key."""
    refusal = ""
    async with engine_session(api_key) as http:
        for api in apis:
            try:
                refusal = await why_locked_out(http, api, config, has_key=api_key is not None)
            except (aiohttp.ClientError, TimeoutError):
                return
            if not refusal:
                return
    if refusal:
        raise ConfigError(refusal)


def _routable(hub: WeightSyncClient) -> Discovery:
    async def engines() -> list[tuple[str, str]]:
        return [(engine.url.rstrip("/"), engine.engine_pool) for engine in await hub.list_engines() if engine.routable]

    return engines
