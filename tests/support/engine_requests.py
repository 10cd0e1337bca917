"""What the contract's tests ask an engine over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp

PROMPT = (72, 101, 108, 108, 111, 32, 119, 111)


@dataclass(frozen=True)
class Completion:
    """One choice of the token-in route."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]
    finish_reason: str
    stop_reason: int | None


def read_choice(choice: dict[str, Any]) -> Completion:
    content = choice["logprobs"]["content"] if choice.get("logprobs") else []
    assert [entry["token"] for entry in content] in ([], [f"token_id:{token}" for token in choice["token_ids"]])
    return Completion(
        token_ids=choice["token_ids"],
        logprobs=[entry["logprob"] for entry in content],
        spans=[tuple(span) for span in choice["version_spans"]],
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
    )


def body_of(prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> dict[str, Any]:
    defaults = {"temperature": 0.0, "max_tokens": 16, "logprobs": 1, "ignore_eos": True}
    return {"token_ids": list(prompt), "sampling_params": {**defaults, **sampling}}


async def generate(http: aiohttp.ClientSession, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Completion:
    """One completion of the token-in route: greedy, 16 tokens, unless `sampling` says otherwise."""
    async with http.post("/inference/v1/generate", json=body_of(prompt, **sampling)) as answer:
        assert answer.status == 200, await answer.text()
        return read_choice((await answer.json())["choices"][0])


async def refused(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str]:
    """(status, message) of a request that must not succeed."""
    async with http.post(path, json=body) as answer:
        assert answer.status >= 400, await answer.text()
        return answer.status, (await answer.json())["error"]["message"]


async def in_flight(http: aiohttp.ClientSession) -> int:
    async with http.get("/version") as answer:
        return int((await answer.json())["in_flight"])


async def until_in_flight(http: aiohttp.ClientSession, count: int) -> None:
    """Waits until so many requests are in flight: it is another process, which tells nobody."""
    async with asyncio.timeout(20):
        while await in_flight(http) != count:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.02)
