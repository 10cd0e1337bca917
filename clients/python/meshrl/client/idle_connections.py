"""Closes idle connections of an aiohttp server, which waits for ever for a first request.

The time counts until a request is complete, and again from each answer's end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

IDLE_S = 60.0
"""Longer than clients keep unused connections, so none is closed under a request."""


class IdleConnections:
    """`middleware` must be the application's first; `closed` surrounds the serving."""

    def __init__(self) -> None:
        self._idle_s = IDLE_S
        self._answering: dict[object, web.Request] = {}
        self._idle_since_s: dict[object, float] = {}

    @property
    def middleware(self) -> Callable[..., Awaitable[web.StreamResponse]]:
        @web.middleware
        async def answering(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            connection = request.protocol
            self._answering[connection], self._idle_since_s[connection] = request, time.monotonic()
            try:
                return await handler(request)
            finally:
                del self._answering[connection]
                self._idle_since_s[connection] = time.monotonic()

        return answering

    @asynccontextmanager
    async def closed(self, runner: web.AppRunner) -> AsyncIterator[None]:
        closing = asyncio.create_task(self._close(runner))
        try:
            yield
        finally:
            closing.cancel()
            await asyncio.wait({closing})

    async def _close(self, runner: web.AppRunner) -> None:
        while runner.server is not None:
            now_s, open_now = time.monotonic(), runner.server.connections
            self._idle_since_s = {each: self._idle_since_s.get(each, now_s) for each in open_now}
            for connection in open_now:
                request = self._answering.get(connection)
                waits = request is None or not request.content.is_eof()
                if waits and now_s - self._idle_since_s[connection] >= self._idle_s:
                    connection.force_close()
            await asyncio.sleep(self._idle_s / 10)
