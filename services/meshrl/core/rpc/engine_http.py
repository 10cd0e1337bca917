"""Asks engines over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Callable

import aiohttp

from meshrl.core.credentials.https import client_context
from meshrl.core.rpc.blocking_http import parsed

NO_ANSWER = (aiohttp.ClientError, TimeoutError)
"""Raised by a call without a whole answer."""


def engine_session(
    api_key: str | None,
    *,
    limit: int = 100,
    timeout: aiohttp.ClientTimeout = aiohttp.client.DEFAULT_TIMEOUT,
    socket_factory: Callable[[aiohttp.AddrInfoType], socket.socket] | None = None,
) -> aiohttp.ClientSession:
    """Connections to engines, at most `limit` at once (0: any number), on which each call shows the key.

    Engines are verified by `client_context`, and asked without a proxy. Raises ConfigError for an unreadable authority.
    """
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        connector=aiohttp.TCPConnector(
            limit=limit, ttl_dns_cache=60, socket_factory=socket_factory, ssl=client_context() or True
        ),
        timeout=timeout,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def ask(
    http: aiohttp.ClientSession, method: str, url: str, *, body: object = None, deadline_s: float | None = None
) -> tuple[int, object]:
    """Raises NO_ANSWER. Without `deadline_s` the session's timeout holds."""
    timeout = http.timeout if deadline_s is None else aiohttp.ClientTimeout(total=deadline_s)
    async with http.request(method, url, json=body, timeout=timeout) as answer:
        return answer.status, parsed(await answer.read())
