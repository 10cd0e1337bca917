"""OpenAI's own client, unchanged, against a served model of either engine whose answers are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError

from chatml_tokenizer import chatml_tokenizer
from engine_mesh import API_KEY, EngineKind, Program
from request_rows import CHAT, PLAIN, TOKENS, openai_rows, other_rows, request
from taught_model import GREETING, HEY, QUESTION, TEMPLATE, TOOL, taught_model

NAME = "org/tiny"
END = b"<|im_end|>"
ARGUMENTS = [{"word": "né"}, {"word": "b"}]


@pytest.fixture(scope="module")
def address(engine_kind: EngineKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if engine_kind.dtype is not torch.float32:
        pytest.skip("the model's answers are certain in float32")
    folder = tmp_path_factory.mktemp(f"sdk-{engine_kind.name}")
    taught_model().save_pretrained(folder / "model")
    chatml_tokenizer(TEMPLATE).save_pretrained(folder / "model")
    config = {
        "engine": engine_kind.name, "max_model_len": 512, "max_num_seqs": 4, "served_model_name": NAME,
        "api_key": API_KEY, "output_dir": str(folder), **engine_kind.config,
        "model": {"name": str(folder / "model"), "dtype": "float32", "device": engine_kind.device},
        "renderer": {"name": "qwen3"}, "server": {"port": 0},
    }  # fmt: skip
    program = Program(engine_kind.python, "meshrl.inference.main", config, folder, "inference")
    try:
        yield program.address(r"on (http://\S+)")
    finally:
        program.stop()


@pytest.fixture
async def sdk(address: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key=API_KEY, max_retries=0, timeout=90.0) as made:
        yield made


def chat(question: dict[str, str], **more: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": question["content"][:2]}, {"type": "text", "text": question["content"][2:]}]
    return {"model": NAME, "messages": [{**question, "content": parts}], "temperature": 0, "max_tokens": 200, **more}


async def test_parts_logprobs_and_bytes_of_an_answer(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(**chat(GREETING, logprobs=True, top_logprobs=2))
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (HEY, "stop")
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] is None
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in entries) == HEY.encode() + END
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(entries)


async def test_a_stream_has_the_same_text_bytes_and_usage(sdk: AsyncOpenAI) -> None:
    text, raw, usage = "", b"", None
    asked = chat(GREETING, logprobs=True, stream=True, stream_options={"include_usage": True})
    async for event in await sdk.chat.completions.create(**asked):
        usage = event.usage
        for choice in event.choices:
            text += choice.delta.content or ""
            raw += b"".join(bytes(entry.bytes or []) for entry in (choice.logprobs and choice.logprobs.content) or [])
    assert (text, raw) == (HEY, HEY.encode() + END)
    assert usage is not None
    assert usage.completion_tokens == len(HEY.encode()) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_outside_of_ascii(sdk: AsyncOpenAI, stream: bool) -> None:
    asked = chat(GREETING, stop=["é", "😀"])
    if stream:
        events = [event async for event in await sdk.chat.completions.create(**asked, stream=True)]
        text, last = "".join(event.choices[0].delta.content or "" for event in events), events[-1].choices[0]
    else:
        last = (await sdk.chat.completions.create(**asked)).choices[0]
        text = last.message.content or ""
    assert last.model_extra is not None
    assert (text, last.finish_reason, last.model_extra["stop_reason"]) == ("HEY ", "stop", "😀")


@pytest.mark.parametrize("stream", [False, True])
async def test_tools(sdk: AsyncOpenAI, stream: bool) -> None:
    asked = chat(QUESTION, tools=[TOOL])
    if stream:
        async with sdk.chat.completions.stream(**asked) as events:
            async for _ in events:
                pass
            choice = (await events.get_final_completion()).choices[0]
    else:
        choice = (await sdk.chat.completions.create(**asked)).choices[0]
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls if call.type == "function"] == ARGUMENTS
    answered = [
        chat(QUESTION)["messages"][0],
        choice.message.model_dump(),
        *({"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "b"}]} for call in calls),
    ]
    again = await sdk.chat.completions.create(**{**asked, "messages": answered, "max_tokens": 1})
    assert again.usage is not None
    assert again.usage.completion_tokens == 1


async def test_plain_completions_with_offsets(sdk: AsyncOpenAI) -> None:
    prompt = chatml_tokenizer(TEMPLATE).apply_chat_template([GREETING], tokenize=False)
    asked: dict[str, Any] = {"model": NAME, "prompt": prompt, "temperature": 0, "logprobs": 2, "max_tokens": 50}
    whole = (await sdk.completions.create(**asked)).choices[0]
    assert whole.text == HEY
    pieces = [event.choices[0] async for event in await sdk.completions.create(**asked, stream=True)]
    assert "".join(piece.text for piece in pieces) == HEY
    for logprobs in ([whole.logprobs], [piece.logprobs for piece in pieces]):
        offsets = [at for each in logprobs if each is not None for at in each.text_offset or []]
        assert offsets == [0, 1, 2, 3, 4, 4, 4, 4, 5, 6]


async def test_what_an_engine_cannot_do_is_refused_by_its_key(sdk: AsyncOpenAI) -> None:
    image = [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]
    refused: dict[str, dict[str, Any]] = {
        "image_url": {"messages": [{"role": "user", "content": image}]},
        "response_format": {"response_format": {"type": "json_object"}},
        "bad_words": {"extra_body": {"bad_words": ["a"]}},
        "guided_regex": {"extra_body": {"guided_regex": "[a-z]"}},
    }
    for key, fields in refused.items():
        with pytest.raises(BadRequestError, match=key):
            await sdk.chat.completions.create(**{**chat(GREETING), **fields})
    with pytest.raises(NotFoundError):
        await sdk.models.retrieve("gpt")
    assert (await sdk.models.retrieve(NAME)).id == NAME


@pytest.mark.parametrize("path", [CHAT, PLAIN, TOKENS])
async def test_every_request_key_is_answered_as_the_table_has_it(sdk: AsyncOpenAI, path: str) -> None:
    rows = [*([] if path == TOKENS else openai_rows(path)), *other_rows(path)]
    assert len(rows) > 100
    for key, value, expected in rows:
        try:
            await sdk.post(
                f"{sdk.base_url}".removesuffix("/v1/") + path, cast_to=object, body=request(path, key, value)
            )
            found, text = 200, ""
        except APIStatusError as error:
            found, text = error.status_code, error.message
        assert (found, expected == 200 or key in text) == (expected, True), (key, value, text)


async def test_requests_at_once_do_not_mix(sdk: AsyncOpenAI) -> None:
    asked = [chat(GREETING), chat(QUESTION)] * 4
    answers = await asyncio.gather(*(sdk.chat.completions.create(**each) for each in asked))
    assert [answer.choices[0].message.content for answer in answers] == [HEY, "Here."] * 4
