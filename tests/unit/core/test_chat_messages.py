"""One shape of messages for every chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatml_tokenizer import chatml_tokenizer
from meshrl.core.chat_messages import normal_message
from meshrl.inference.http.tokenizer import TextCodec
from meshrl.sft.data import rendering
from meshrl.sft.data.conversations import DataError, to_conversation
from meshrl.wire.errors import MeshError
from meshrl_examples.model import create_tokenizer

PARTS = [{"type": "text", "text": "What is "}, {"type": "input_text", "text": "2+2?"}]
QWEN = (Path(rendering.__file__).with_name("templates") / "qwen3.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_for_every_role(role: str) -> None:
    assert normal_message({"role": role, "content": PARTS}) == {"role": role, "content": "What is 2+2?"}


def test_null_content_is_the_empty_text_and_an_answer_that_calls_tools_needs_none() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"word": "b"}'}}
    read = {**call, "function": {"name": "find", "arguments": {"word": "b"}}}
    assert normal_message({"role": "assistant", "content": None})["content"] == ""
    assert normal_message({"role": "assistant", "tool_calls": [call]}) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [read],
    }


@pytest.mark.parametrize("calls", [None, []])
def test_a_message_without_calls_has_no_key_for_them(calls: object) -> None:
    message = {"role": "assistant", "content": "hi"}
    assert normal_message({**message, "tool_calls": calls}) == message


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_is_there_by_both_names(key: str) -> None:
    message = normal_message({"role": "assistant", "content": "hi", key: "why"})
    assert (message["reasoning"], message["reasoning_content"]) == ("why", "why")


def test_arguments_that_are_no_object_stay_as_the_model_wrote_them() -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": '{"word": '}}
    message = normal_message({"role": "assistant", "content": "", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == '{"word": '


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "'user' needs content"),
        ({"content": "hi"}, "a message needs a role"),
        ({"role": "user", "content": 5}, "must be a string, a list of text parts or null, got int"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "a part of type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "needs its text as a string"),
        ({"role": "user", "content": [7]}, "must be an object, got 7"),
    ],
)
async def test_what_no_text_model_reads_is_refused_in_requests_and_data(message: dict[str, Any], words: str) -> None:
    codec = TextCodec(chatml_tokenizer(QWEN))
    with pytest.raises(MeshError, match=words) as refused:
        await codec.encode_chat([message], arguments={}, add_generation_prompt=True)
    assert "messages[0]" in str(refused.value)
    with pytest.raises(DataError, match=words):
        to_conversation({"messages": [message]}, "row 0")


@pytest.mark.parametrize("template", [QWEN, None], ids=["qwen3", "demo"])
async def test_a_question_in_parts_has_the_tokens_of_the_same_text(template: str | None) -> None:
    tokenizer = create_tokenizer() if template is None else chatml_tokenizer(template)
    codec = TextCodec(tokenizer)

    async def tokens(content: object) -> list[int]:
        messages: list[Any] = [{"role": "user", "content": content}]
        return list(await codec.encode_chat(messages, arguments={}, add_generation_prompt=True))

    assert await tokens(PARTS) == await tokens("What is 2+2?")
    (in_data,) = to_conversation({"messages": [{"role": "user", "content": PARTS}]}, "row 0").messages
    assert in_data["content"] == "What is 2+2?"
