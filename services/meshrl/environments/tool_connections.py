"""Keeps connections to tool servers that all rollouts of an environment share, from one rollout to the next.

Opening one costs as much as many calls: a handshake, a listing of the tools, and certificates. A connection is kept
only if the server cannot distinguish rollouts: one address for all, and a protocol without sessions.
"""

from __future__ import annotations

import functools
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module

from verifiers.v1.harnesses.utils.mcp import MCPConnection, connect_mcp

from meshrl.wire.values import JsonObject

IDLE_AT_MOST = 512
KEPT_S = 60.0
"""An older connection is opened anew, which asks the server again for its tools."""

Servers = Mapping[str, Mapping[str, object]]
"""`url` and `timeout` of each tool server, by name."""


@dataclass(eq=False)
class ToolConnection:
    """Open connections to the tool servers of one rollout, and their tools in the chat API's form."""

    key: str
    stack: AsyncExitStack
    tools: list[JsonObject]
    dispatch: dict[str, tuple[str, str]]
    servers: dict[str, MCPConnection]
    opened_s: float

    @property
    def without_sessions(self) -> bool:
        """All are up and speak a protocol in which the server keeps nothing between two calls."""
        from mcp_types.version import MODERN_PROTOCOL_VERSIONS  # only tasksets with tools load it

        return all(
            server.task is not None
            and not server.task.done()
            and server.ready is not None
            and server.ready.done()
            and server.ready.result().protocol_version in MODERN_PROTOCOL_VERSIONS
            for server in self.servers.values()
        )


class ToolConnections:
    """`shared`: addresses that are the same for all rollouts."""

    def __init__(self, shared: frozenset[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._shared = shared
        self._clock = clock
        self._idle: defaultdict[str, list[ToolConnection]] = defaultdict(list)

    async def take(self, servers: Servers) -> ToolConnection:
        """Kept connections, or new ones. Raises what connecting raises."""
        key = repr(sorted((name, *sorted(spec.items())) for name, spec in servers.items()))
        while idle := self._idle[key]:
            kept = idle.pop()
            if kept.without_sessions and self._clock() - kept.opened_s < KEPT_S:
                return kept
            await kept.stack.aclose()
        _share_certificates()
        async with AsyncExitStack() as stack:
            tools, dispatch, opened = await connect_mcp({"mcpServers": servers}, stack)
            return ToolConnection(key, stack.pop_all(), tools, dispatch, opened, self._clock())

    async def give_back(self, connection: ToolConnection) -> None:
        """Keeps connections for the next rollout if that cannot matter to it; else closes them."""
        idle = self._idle[connection.key]
        shared = all(server.spec["url"] in self._shared for server in connection.servers.values())
        if shared and connection.without_sessions and len(idle) < IDLE_AT_MOST:
            idle.append(connection)
            return
        if not idle:
            del self._idle[connection.key]
        await connection.stack.aclose()

    async def close(self) -> None:
        waiting = [connection for idle in self._idle.values() for connection in idle]
        self._idle.clear()
        for connection in waiting:
            await connection.stack.aclose()


@functools.cache
def _share_certificates() -> None:
    """Has the HTTP client of the tools' protocol read the system's certificates once, not for each connection, which
    takes 20 ms of the event loop, also without TLS."""
    default = import_module("httpx2._transports.default")  # only tasksets with tools load it
    inner = default.create_ssl_context
    usual: dict[bool, ssl.SSLContext] = {}

    @functools.wraps(inner)
    def create_ssl_context(verify: object = True, cert: object = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            made: ssl.SSLContext = inner(verify=verify, cert=cert, trust_env=trust_env)
            return made
        if trust_env not in usual:
            usual[trust_env] = inner(trust_env=trust_env)
        return usual[trust_env]

    vars(default)["create_ssl_context"] = create_ssl_context
