"""OpenAI's own client, unchanged, against either engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.chat import ChatCompletionTokenLogprob

from engine_mesh import API_KEY, MODEL_NAME, EngineMesh

ASKED: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 30, "seed": 2, "extra_body": {"ignore_eos": True}}


@pytest.fixture
async def sdk(mesh: EngineMesh) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key=API_KEY, max_retries=0, timeout=90.0) as made:
        yield made


def names(entry: ChatCompletionTokenLogprob) -> list[tuple[str, list[int] | None]]:
    return [(each.token, each.bytes) for each in (entry, *entry.top_logprobs)]


async def test_a_streamed_chat_is_the_whole_one(mesh: EngineMesh, sdk: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "messages": [{"role": "user", "content": "abc"}], "logprobs": True}
    asked["top_logprobs"] = 2
    whole = await sdk.chat.completions.create(**asked)
    [choice] = whole.choices
    assert choice.logprobs is not None
    expected = choice.logprobs.content or []
    assert [len(entry.top_logprobs) for entry in expected] == [2] * 30
    text, found, usage, roles = "", list[ChatCompletionTokenLogprob](), None, []
    async for event in await sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = event.usage
        for piece in event.choices:
            text += piece.delta.content or ""
            roles.append(piece.delta.role)
            found += (piece.logprobs and piece.logprobs.content) or []
    assert (text, usage) == (choice.message.content, whole.usage)
    assert roles == ["assistant"] + [None] * (len(roles) - 1)
    assert list(map(names, found)) == list(map(names, expected))
    assert [entry.logprob for entry in found] == pytest.approx(
        [entry.logprob for entry in expected], abs=mesh.kind.logprob_atol
    )


async def test_a_streamed_completion_is_the_whole_one(mesh: EngineMesh, sdk: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "prompt": "abc", "logprobs": 2}
    whole = (await sdk.completions.create(**asked)).choices[0]
    pieces = [event.choices[0] async for event in await sdk.completions.create(**asked, stream=True)]
    assert len(pieces) > 1  # it comes while it is made, in as many pieces as the server finds time for
    assert "".join(piece.text for piece in pieces) == whole.text
    expected, parts = whole.logprobs, [piece.logprobs for piece in pieces if piece.logprobs is not None]
    assert expected is not None
    assert [token for part in parts for token in part.tokens or []] == expected.tokens
    assert [offset for part in parts for offset in part.text_offset or []] == expected.text_offset
    assert [list(top) for part in parts for top in part.top_logprobs or []] == list(
        map(list, expected.top_logprobs or [])
    )
    found = [logprob for part in parts for logprob in part.token_logprobs or []]
    assert found == pytest.approx(expected.token_logprobs, abs=mesh.kind.logprob_atol)


async def test_the_configured_renderer_takes_tools(sdk: AsyncOpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "find", "parameters": {}}}
    asked: dict[str, Any] = {**ASKED, "messages": [{"role": "user", "content": "abc"}], "tools": [tool]}
    answer = await sdk.chat.completions.create(**asked)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30


async def test_its_errors_are_those_of_what_is_not_served(sdk: AsyncOpenAI) -> None:
    image = [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]
    with pytest.raises(BadRequestError, match="image_url"):
        await sdk.chat.completions.create(model=MODEL_NAME, messages=[{"role": "user", "content": image}])  # type: ignore[misc,list-item]  # no image that it knows
    with pytest.raises(NotFoundError):
        await sdk.models.retrieve("gpt")
    assert (await sdk.models.retrieve(MODEL_NAME)).id == MODEL_NAME
