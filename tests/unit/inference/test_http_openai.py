"""OpenAI's routes for chat and completions, over a real engine."""

from typing import Any

import pytest

from inference_kit import EngineFactory, Start, events, make_tokenizer, post
from meshrl.inference.http.tokenizer import TextCodec, TextStream

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "ab", "parameters": {}}}]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "ab"}}},
    ],
)
async def test_tools_without_a_renderer_are_refused(serve: Start, fields: dict[str, Any]) -> None:
    client = await serve()
    status, answer = await post(client, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **fields})
    assert status == 400
    assert next(iter(fields)) in answer["error"]["message"]
    assert any(way in answer["error"]["message"] for way in ("leave", "send", "use"))


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


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("stops", "text", "stopped_by"),
    [
        (["ab"], "xab", "ab"),
        (["b"], "xaba", "b"),
        (["ba"], "xa", "ba"),
        (["xab"], "xabab", None),
        (["abb", "b"], "xaba", "b"),
    ],
)
def test_stop_strings_are_found_behind_min_tokens(
    stops: list[str], text: str, stopped_by: str | None, together: bool
) -> None:
    """As vLLM has it: one that ends in a later token, wherever it begins."""
    stream = TextStream(TextCodec(make_tokenizer()), skip_special_tokens=True, stops=stops, min_tokens=3)
    ids = make_tokenizer().encode("xabab", add_special_tokens=False)
    pushed = [ids] if together else [[each] for each in ids]
    found = "".join([*[stream.push(each) for each in pushed], stream.push([], last=True)])
    assert (found, stream.stopped_by) == (text, stopped_by)


async def test_a_completion_has_min_tokens_whatever_its_stop_strings(serve: Start) -> None:
    client, asked = await serve(), {"prompt": "ab", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    _, whole = await post(client, "/v1/completions", asked)
    stop = whole["choices"][0]["text"][0]
    _, answer = await post(client, "/v1/completions", {**asked, "stop": stop, "min_tokens": 8})
    assert answer["usage"]["completion_tokens"] > 8


@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompts_tokens_are_returned(serve: Start, stream: bool) -> None:
    client = await serve()
    asked = {"max_tokens": 2, "return_token_ids": True, "ignore_eos": True, "stop": ["!!!"], "stream": stream}
    chat, prompts = {**asked, "messages": MESSAGES}, {**asked, "prompt": [[1, 2], [3]]}
    if stream:
        whole = await events(client, "/v1/chat/completions", chat)
        pieces = [choice for event in await events(client, "/v1/completions", prompts) for choice in event["choices"]]
    else:
        whole = [(await post(client, "/v1/chat/completions", chat))[1]]
        pieces = (await post(client, "/v1/completions", prompts))[1]["choices"]
    assert make_tokenizer().decode(whole[0]["prompt_token_ids"]) == "u:a\na:"
    assert not any("prompt_token_ids" in event for event in whole[1:])
    found = sorted((each["index"], each["prompt_token_ids"]) for each in pieces if "prompt_token_ids" in each)
    assert found == [(0, [1, 2]), (1, [3])]


def test_text_streams_hold_back_half_characters_and_half_stop_strings() -> None:
    codec = TextCodec(make_tokenizer())
    ids = make_tokenizer().encode("xaé", add_special_tokens=False)
    assert len(ids) == 4  # the last character is two bytes
    stream = TextStream(codec, skip_special_tokens=True, stops=("ab",))
    assert [stream.push([each]) for each in ids] == ["x", "", "", "aé"]
    stream = TextStream(codec, skip_special_tokens=True, stops=("ab",))
    assert [stream.push([each]) for each in make_tokenizer().encode("xab", add_special_tokens=False)] == ["x", "", ""]
    assert stream.stopped


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop": ""}, "stop: an empty text"),
        ({"stop": ["b", ""]}, "stop: an empty text"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens: 3 is more than max_tokens, which is 2"),
        ({"min_tokens": 3, "max_tokens": None, "max_completion_tokens": 2}, "min_tokens: 3 is more than max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options: is for streams alone"),
    ],
)
async def test_what_contradicts_itself_is_refused(serve: Start, path: str, fields: dict[str, Any], words: str) -> None:
    client = await serve()
    asked = {"messages": MESSAGES} if "chat" in path else {"prompt": "a"}
    status, answer = await post(client, path, {**asked, **fields})
    assert (status, words in answer["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_text_ends_at_the_tokenizers_end_of_text_where_the_models_is_another(
    serve: Start, start_engine: EngineFactory, path: str
) -> None:
    """As vLLM's does; bias has the model sample the tokenizer's."""
    client = await serve(await start_engine(eos_token_ids=(5,)))
    asked = {"messages": MESSAGES} if "chat" in path else {"prompt": "a"}
    body = {**asked, "max_tokens": 4, "logit_bias": {0: 100.0}, "return_token_ids": True}
    (choice,) = (await post(client, path, body))[1]["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([0], "stop", None)
    (choice,) = (await post(client, path, {**body, "ignore_eos": True}))[1]["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([0] * 4, "length")


async def test_no_alternatives_are_the_sampled_tokens_alone(serve: Start) -> None:
    """logprobs 0, as vLLM and OpenAI answer it."""
    client = await serve()
    body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True, "logprobs": 0}
    logprobs = (await post(client, "/v1/completions", body))[1]["choices"][0]["logprobs"]
    sampled = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{token: logprob} for token, logprob in sampled]


async def test_a_message_is_continued_without_a_generation_prompt(serve: Start) -> None:
    client = await serve()
    body = {"messages": MESSAGES, "max_tokens": 1, "continue_final_message": True, "ignore_eos": True}
    status, answer = await post(client, "/v1/chat/completions", {**body, "add_generation_prompt": True})
    assert (status, "leave one of them out" in answer["error"]["message"]) == (400, True)
    for fields in ({}, {"add_generation_prompt": False}):
        assert (await post(client, "/v1/chat/completions", {**body, **fields}))[0] == 200
