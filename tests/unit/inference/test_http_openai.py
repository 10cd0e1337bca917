"""OpenAI's routes for chat and completions, over a real engine."""

from typing import Any

import pytest

from inference_kit import Start, events, make_tokenizer, post
from meshrl.inference.http.tokenizer import TextCodec, TextStream

MESSAGES = [{"role": "user", "content": "a"}]


async def test_chat_renders_the_template_and_returns_text(serve: Start) -> None:
    client = await serve()
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 6, "seed": 1,
        "ignore_eos": True, "logprobs": True, "top_logprobs": 2, "return_token_ids": True,
    }  # fmt: skip
    _, answer = await post(client, "/v1/chat/completions", body)
    tokenizer = make_tokenizer()
    assert answer["object"] == "chat.completion"
    assert tokenizer.decode(answer["prompt_token_ids"]) == "u:abc\na:"
    [choice] = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": tokenizer.decode(choice["token_ids"], skip_special_tokens=True),
    }
    assert choice["finish_reason"] == "length"
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [2] * 6
    assert answer["usage"]["completion_tokens"] == 6


async def test_chat_stream_adds_up_to_the_whole_answer(serve: Start) -> None:
    client = await serve()
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 8, "seed": 1, "ignore_eos": True}
    _, whole = await post(client, "/v1/chat/completions", body)
    made = await events(
        client, "/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert made[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in made[1:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert made[-2]["choices"][0]["finish_reason"] == "length"
    assert made[-1]["usage"] == whole["usage"]
    assert all(event["object"] == "chat.completion.chunk" for event in made)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "ab", "parameters": {}}}]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "ab"}}},
        {"functions": [{"name": "ab"}]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_json": {"type": "object"}},
        {"bad_words": ["a"]},
        {"best_of": 2},
        {"typical_p": 0.5},
        {"no_repeat_ngram_size": 2},
        {"use_beam_search": True},
        {"thinking_token_budget": 5},
    ],
)
async def test_what_would_be_ignored_is_refused(serve: Start, fields: dict[str, Any]) -> None:
    client = await serve()
    status, answer = await post(client, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **fields})
    assert status == 400
    assert next(iter(fields)) in answer["error"]["message"]
    assert any(way in answer["error"]["message"] for way in ("leave", "send", "use"))
    if "response_format" in fields:
        assert (await post(client, "/v1/completions", {"prompt": "a", "max_tokens": 1, **fields}))[0] == 400


async def test_neutral_values_of_what_is_not_supported_are_taken(serve: Start) -> None:
    fields = {
        "tools": [],
        "tool_choice": "auto",
        "functions": [],
        "response_format": {"type": "text"},
        "structured_outputs": None,
    }
    status, _ = await post(await serve(), "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **fields})
    assert status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "tokens"),
    [({"prompt": [[1, 2], [1, 2], [3]]}, 5), ({"prompt": ["ab", "ab"], "n": 3}, 4), ({"prompt": "ab", "n": 3}, 2)],
)
async def test_usage_counts_every_prompt_once(serve: Start, fields: dict[str, Any], tokens: int, stream: bool) -> None:
    client = await serve()
    body = {**fields, "max_tokens": 2, "ignore_eos": True, "stream": stream}
    if stream:
        usage = (await events(client, "/v1/completions", {**body, "stream_options": {"include_usage": True}}))[-1][
            "usage"
        ]
    else:
        usage = (await post(client, "/v1/completions", body))[1]["usage"]
    assert usage["prompt_tokens"] == tokens


async def test_a_stop_string_ends_the_text_before_it(serve: Start) -> None:
    client = await serve()
    body = {"prompt": "abc", "max_tokens": 40, "seed": 2, "ignore_eos": True}
    _, whole = await post(client, "/v1/completions", body)
    text = whole["choices"][0]["text"]
    stop = text[3:5]
    _, cut = await post(client, "/v1/completions", {**body, "stop": [stop]})
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < 40
    streamed = await events(client, "/v1/completions", {**body, "stop": stop, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in streamed) == cut["choices"][0]["text"]
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"


async def test_completions_take_text_tokens_and_lists_of_them(serve: Start) -> None:
    client = await serve()
    for prompt, count in (("abc", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)):
        _, answer = await post(client, "/v1/completions", {"prompt": prompt, "logprobs": 2, "ignore_eos": True})
        assert len(answer["choices"]) == count
        logprobs = answer["choices"][-1]["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 16
        assert len(logprobs["top_logprobs"]) == 16
        assert len(logprobs["text_offset"]) == 16
        assert logprobs["text_offset"][0] == 0


def test_text_streams_hold_back_half_characters_and_half_stop_strings() -> None:
    codec = TextCodec(make_tokenizer())
    ids = make_tokenizer().encode("xaé", add_special_tokens=False)
    assert len(ids) == 4  # the last character is two bytes
    stream = TextStream(codec, skip_special_tokens=True, stops=("ab",))
    assert [stream.push([each]) for each in ids] == ["x", "", "", "aé"]
    stream = TextStream(codec, skip_special_tokens=True, stops=("ab",))
    assert [stream.push([each]) for each in make_tokenizer().encode("xab", add_special_tokens=False)] == ["x", "", ""]
    assert stream.stopped
