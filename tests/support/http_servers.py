"""HTTP servers in the process of a test, and the answer of a server that speaks OpenAI's chat route."""

from __future__ import annotations

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
        await running.cleanup()


def chat_answer(body: Mapping[str, Any], message: Mapping[str, Any]) -> web.Response:
    """What a chat server answers to a request: one message, of one token."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    made = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
    return web.json_response({**made, "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})
