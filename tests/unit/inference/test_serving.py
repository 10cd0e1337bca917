"""How a stream over HTTP ends when the engine behind it fails, stops early or is too slow."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestServer

from inference_kit import make_tokenizer
from meshrl.inference.engine import FinishReason, GenerateRequest, TokenChunk
from meshrl.inference.http.app import InferenceServer
from meshrl.inference.http.tokenizer import TextCodec

GENERATE = ("/inference/v1/generate", {"token_ids": [1], "stream": True, "sampling_params": {"max_tokens": 4, "n": 2}})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 4})
TEXT = ("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 4, "n": 2})
DEADLINE_S = 601.0

Ask = Callable[[Any, tuple[str, dict[str, Any]]], Awaitable[tuple[int, str]]]


def token(start: int, finish: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(
        start=start, token_ids=np.array([1], np.int32), logprobs=np.zeros(1, np.float32), finish_reason=finish
    )


class Misbehaving:
    """An engine that gives some tokens and then does what the test asks for."""

    version, root, adapters, runs, draining, unfit, in_flight = 3, None, None, {}, False, None, 0
    max_model_len, vocab_size = 96, 40

    def __init__(self, tokens: int, then: Callable[[], Awaitable[None]]) -> None:
        self.open = 0
        self._tokens, self._then = tokens, then

    async def generate(self, _request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.open += 1
        try:
            for start in range(self._tokens):
                yield token(start)
            await self._then()
        finally:
            self.open -= 1


async def fail() -> None:
    raise RuntimeError("the cache is on fire")


async def end() -> None:
    return None


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    """Sends one request and gives the status and whatever bytes follow the head, until the server ends them."""
    servers: list[TestServer] = []
    codec = TextCodec(make_tokenizer())

    async def call(engine: Any, what: tuple[str, dict[str, Any]]) -> tuple[int, str]:
        app = InferenceServer(engine, model_name="m", codec=codec, request_deadline_s=DEADLINE_S).app()
        server = TestServer(app, shutdown_timeout=1.0)
        await server.start_server()
        servers.append(server)
        path, body = what
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode() + data
        )  # fmt: skip
        # whole connections, so that whatever is written behind the body is seen, too
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60.0)
        status = int(head.split()[1])
        text = ""
        if status == 200:
            text = (await asyncio.wait_for(reader.read(), 60.0)).decode()
        writer.close()
        return status, text

    yield call
    for server in servers:
        await server.close()


def events(chunked: str) -> list[str]:
    """The data of each event of a chunked body that is one well-formed body and nothing else."""
    body = ""
    while chunked:
        size, chunked = chunked.split("\r\n", 1)
        length = int(size, 16)
        body += chunked[:length]
        assert chunked[length : length + 2] == "\r\n"
        chunked = chunked[length + 2 :]
        if length == 0:
            assert chunked == ""
    return [line.removeprefix("data: ") for line in body.split("\n\n") if line]


@pytest.mark.parametrize("what", [GENERATE, CHAT, TEXT], ids=["generate", "chat", "completions"])
async def test_defect_inside_an_engine_ends_the_stream_with_an_error_event(ask: Ask, what: Any) -> None:
    engine = Misbehaving(2, fail)
    status, text = await ask(engine, what)
    *before, last = events(text)
    assert status == 200
    assert before
    error = json.loads(last)["error"]
    assert (error["reason"], error["code"]) == ("INTERNAL", 500)
    assert "the cache is on fire" in error["message"]
    assert engine.open == 0


@pytest.mark.parametrize("what", [GENERATE, CHAT, TEXT], ids=["generate", "chat", "completions"])
async def test_defect_before_the_first_token_is_answered_with_its_status(ask: Ask, what: Any) -> None:
    assert (await ask(Misbehaving(0, fail), what))[0] == 500


@pytest.mark.parametrize("what", [GENERATE, CHAT, TEXT], ids=["generate", "chat", "completions"])
async def test_stream_that_outlives_its_deadline_ends_with_an_error_event(
    ask: Ask, what: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline passes when the engine hangs, however long the machine took until then."""
    timeout, limits = asyncio.timeout, list[asyncio.Timeout]()

    def noted(delay: float | None) -> asyncio.Timeout:
        limit = timeout(delay)
        if delay == DEADLINE_S:
            limits.append(limit)
        return limit

    async def hang() -> None:
        limits[-1].reschedule(0.0)
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "timeout", noted)
    engine = Misbehaving(2, hang)
    status, text = await ask(engine, what)
    assert status == 200
    error = json.loads(events(text)[-1])["error"]
    assert (error["reason"], error["code"]) == ("DEADLINE_PASSED", 504)
    assert engine.open == 0


@pytest.mark.parametrize("what", [GENERATE, CHAT], ids=["generate", "chat"])
async def test_engine_that_forgets_to_finish_a_completion_is_not_waited_for(ask: Ask, what: Any) -> None:
    status, text = await ask(Misbehaving(2, end), what)
    assert status == 200
    error = json.loads(events(text)[-1])["error"]
    assert (error["reason"], error["code"]) == ("ENGINE_FAILED", 503)


@pytest.mark.parametrize("tokens", [0, 2])
async def test_unfinished_completion_is_never_given_as_a_whole_one(ask: Ask, tokens: int) -> None:
    path, body = GENERATE
    assert (await ask(Misbehaving(tokens, end), (path, {**body, "stream": False})))[0] == 503
    path, body = TEXT
    assert (await ask(Misbehaving(tokens, end), (path, {**body, "stream": False})))[0] == 503


async def test_route_itself_may_not_answer_twice(ask: Ask) -> None:
    """A defect while an event is made, such as one in the tokenizer, is said in the stream as well."""

    class OddToken(Misbehaving):
        async def generate(self, _request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            yield token(0)
            yield TokenChunk(start=1, token_ids=None, logprobs=np.zeros(1, np.float32))  # type: ignore[arg-type]

    status, text = await ask(OddToken(0, end), TEXT)
    assert status == 200
    assert json.loads(events(text)[-1])["error"]["reason"] == "INTERNAL"
