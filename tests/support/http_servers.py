"""HTTP servers in the process of a test, and the answer of a server that speaks OpenAI's chat route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def serving_http(app: web.Application, **runner: Any) -> AsyncIterator[str]:
    """Serves on a port of the loopback that is free; yields the URL. `runner` are arguments of `AppRunner`."""
    running = web.AppRunner(app, shutdown_timeout=0.1, **runner)
    await running.setup()
    try:
        await web.TCPSite(running, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{running.addresses[0][1]}"
    finally:
        await stop_serving(running)


async def stop_serving(runner: web.AppRunner) -> None:
    """Accepts no more connections, and closes those that there are.

    `AppRunner.cleanup` alone leaks a connection accepted just before it: Python 3.11 refuses the transport of a closed
    server after it opened it, so that nobody closes it and its client waits.
    """
    loop = asyncio.get_running_loop()
    for site in runner.sites:
        assert isinstance(site._server, asyncio.Server)
        for listener in site._server.sockets:
            loop.remove_reader(listener.fileno())
    await asyncio.sleep(0.01)  # until accepted connections have their transports
    await runner.cleanup()


def chat_answer(body: Mapping[str, Any], message: Mapping[str, Any]) -> web.Response:
    """What a chat server answers to a request: one message, of one token."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    made = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
    return web.json_response({**made, "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})
