"""Runs the completions of one HTTP request on the engine, within its deadline; shared by the routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from meshrl.inference.completion import Completion, join
from meshrl.inference.engine import Engine, FinishReason, GenerateRequest, TokenChunk
from meshrl.wire.completion_frame import MEDIA_TYPE, CompletionFrame, encode
from meshrl.wire.errors import MeshError, Reason

VERSION_HEADER = "X-Policy-Version"

Result = TypeVar("Result")


class Serving:
    """What every route needs: the engine, its limits and the name of its model."""

    def __init__(self, engine: Engine, *, model_name: str, max_model_len: int, request_deadline_s: float) -> None:
        self.engine = engine
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.request_deadline_s = request_deadline_s

    def room(self, prompt_tokens: int) -> int:
        """Tokens that fit behind a prompt. Raises: MeshError INVALID_REQUEST when none does."""
        room = self.max_model_len - prompt_tokens
        if room < 1 or prompt_tokens < 1:
            raise MeshError(
                Reason.INVALID_REQUEST,
                f"the prompt has {prompt_tokens} tokens, but this model's maximum context length is "
                f"{self.max_model_len} tokens, at least one of them for the completion; send 1 to "
                f"{self.max_model_len - 1} prompt tokens",
            )
        return room

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.request_deadline_s):
                yield
        except TimeoutError as error:
            raise MeshError(
                Reason.DEADLINE_PASSED,
                f"the request took longer than request_deadline_s ({self.request_deadline_s:g} s) and was cancelled",
            ) from error

    async def complete(self, request: GenerateRequest) -> Completion:
        """The whole completion. Raises: MeshError DRAINING when it was cut by a shutdown."""
        async with aclosing(self.engine.generate(request)) as chunks:
            completion = join([chunk async for chunk in chunks])
        if completion.finish_reason is FinishReason.ABORT:
            raise MeshError(Reason.DRAINING, "the engine shut down before this completion was finished; send it again")
        return completion


async def gather(calls: list[Awaitable[Result]]) -> list[Result]:
    """All results in order; the first failure cancels the rest."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel(tasks)


async def cancel(tasks: Sequence[asyncio.Future[Result]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def interleave(engine: Engine, requests: list[GenerateRequest]) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """Chunks of several completions as they come, each with the index of its request."""
    ready: asyncio.Queue[tuple[int, TokenChunk] | BaseException] = asyncio.Queue()

    async def pump(index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(engine.generate(request)) as chunks:
                async for chunk in chunks:
                    ready.put_nowait((index, chunk))
        except MeshError as error:  # the reader raises it; the other completions end with it
            ready.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(index, request)) for index, request in enumerate(requests)]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await ready.get()  # bounded by the request's deadline
            if isinstance(item, BaseException):
                raise item
            open_streams -= item[1].finish_reason is not None
            yield item
    finally:
        await cancel(tasks)


def json_answer(text: str, version: int | None) -> web.Response:
    headers = {} if version is None else {VERSION_HEADER: str(version)}
    return web.Response(text=text, content_type="application/json", headers=headers)


def frame_answer(frame: CompletionFrame, version: int | None) -> web.Response:
    headers = {} if version is None else {VERSION_HEADER: str(version)}
    return web.Response(body=encode(frame), content_type=MEDIA_TYPE, headers=headers)


async def send_events(
    request: web.Request, events: AsyncGenerator[str, None], version: int | None
) -> web.StreamResponse:
    """Server-sent events, ended by [DONE]. An error is answered as one before the first event, later as an event."""
    async with aclosing(events):
        return await _send_events(request, events, version)


async def _send_events(request: web.Request, events: AsyncIterator[str], version: int | None) -> web.StreamResponse:
    first = await anext(events)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    if version is not None:
        response.headers[VERSION_HEADER] = str(version)
    await response.prepare(request)
    await response.write(f"data: {first}\n\n".encode())
    try:
        async for event in events:
            await response.write(f"data: {event}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
    except MeshError as error:  # the status line is out; the error goes where the next token would
        await response.write(f"data: {json.dumps(error_body(error))}\n\n".encode())
    await response.write_eof()
    return response


STATUS_OF: dict[Reason, int] = {
    Reason.INVALID_REQUEST: 400,
    Reason.NOT_SUPPORTED: 400,
    Reason.LAYOUT_MISMATCH: 400,
    Reason.OVERLOADED: 429,
    Reason.DRAINING: 503,
    Reason.VERSION_NOT_AVAILABLE: 503,
    Reason.ENGINE_FAILED: 503,
    Reason.DEADLINE_PASSED: 504,
}


def error_body(error: MeshError) -> dict[str, Any]:
    """OpenAI's error shape; `reason` is the catalogue's name."""
    status = STATUS_OF.get(error.reason, 500)
    kind = {400: "invalid_request_error", 429: "rate_limit_error"}.get(status, "server_error")
    return {
        "error": {
            "message": error.message, "type": kind, "param": None, "code": status, "reason": error.reason.name,
        }
    }  # fmt: skip
