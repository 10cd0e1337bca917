"""A completion ends where the request says: at stop tokens, at the end token, at its limits, at stop strings."""

from __future__ import annotations

from engine_mesh import MODEL_NAME, EngineClient
from plain_model import EOS, make_tokenizer

PROMPT = [1, 2, 3]


async def test_stop_token_ends_a_completion_and_is_its_last_token(client: EngineClient) -> None:
    whole = (await client.greedy(PROMPT))["token_ids"]
    stop = whole[6]
    first = whole.index(stop)
    choice = await client.one(PROMPT, temperature=0.0, stop_token_ids=[stop])
    assert choice["token_ids"] == whole[: first + 1]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert len(choice["logprobs"]["content"]) == first + 1


async def test_end_token_ends_a_completion_unless_it_is_ignored(client: EngineClient) -> None:
    sampling = {"n": 16, "seed": 3, "max_tokens": 200, "temperature": 1.5}
    ended = await client.generate(PROMPT, ignore_eos=False, **sampling)
    ignored = await client.generate(PROMPT, ignore_eos=True, **sampling)
    stopped = [choice for choice in ended if choice["finish_reason"] == "stop"]
    assert stopped
    for choice in stopped:
        assert choice["token_ids"].index(EOS) == len(choice["token_ids"]) - 1
        assert choice["stop_reason"] == EOS
    assert all(len(choice["token_ids"]) == 200 and choice["finish_reason"] == "length" for choice in ignored)
    for one, other in zip(ended, ignored, strict=True):
        assert one["token_ids"] == other["token_ids"][: len(one["token_ids"])]


async def test_max_tokens_ends_a_completion(client: EngineClient) -> None:
    for count in (1, 7):
        choice = await client.one(PROMPT, max_tokens=count)
        assert len(choice["token_ids"]) == count
        assert choice["finish_reason"] == "length"
        assert choice["stop_reason"] is None


async def test_no_stop_token_comes_before_min_tokens(client: EngineClient) -> None:
    stops = list(range(1, 40))  # most of the vocabulary: without min_tokens the first token would nearly always stop
    choices = await client.generate(
        PROMPT, n=8, seed=1, min_tokens=5, max_tokens=60, stop_token_ids=stops, ignore_eos=False
    )
    assert all(len(choice["token_ids"]) > 5 for choice in choices)
    for choice in choices:
        assert not set(choice["token_ids"][:5]) & {*stops, EOS}
        assert choice["finish_reason"] == "stop"


async def test_stop_string_cuts_the_text_before_it(client: EngineClient) -> None:
    body = {"model": MODEL_NAME, "prompt": "abc", "temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    whole = (await client.post("/v1/completions", body)).body["choices"][0]["text"]
    stop = whole[5:8]
    answer = await client.post("/v1/completions", {**body, "stop": ["no such text", stop]})
    choice = answer.body["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    await client.until_in_flight(0)  # what comes after the stop string is not computed to its end


async def test_chat_stops_at_a_string_and_at_a_token(client: EngineClient) -> None:
    body = {
        "model": MODEL_NAME, "messages": [{"role": "user", "content": "abc"}], "temperature": 0.0, "max_tokens": 40,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    whole = (await client.post("/v1/chat/completions", body)).body
    assert make_tokenizer().decode(whole["prompt_token_ids"]) == "u:abc\na:"
    choice = whole["choices"][0]
    text, token_ids = choice["message"]["content"], choice["token_ids"]
    by_text = (await client.post("/v1/chat/completions", {**body, "stop": text[4:6]})).body["choices"][0]
    assert by_text["message"]["content"] == text[: text.index(text[4:6])]
    by_token = (await client.post("/v1/chat/completions", {**body, "stop_token_ids": [token_ids[6]]})).body["choices"][
        0
    ]
    first = token_ids.index(token_ids[6])
    assert by_token["token_ids"] == token_ids[: first + 1]
    assert by_token["message"]["content"] == make_tokenizer().decode(token_ids[:first])
