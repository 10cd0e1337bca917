"""What /inference/v1/generate answers in JSON, over a real engine."""

import numpy as np
from transformers import PreTrainedModel

from inference_kit import Start, events, full_forward, post, unpack


async def test_generate_returns_tokens_logprobs_and_spans(model: PreTrainedModel, serve: Start) -> None:
    client = await serve()
    sampling = {"max_tokens": 9, "logprobs": 1, "seed": 3, "temperature": 0.7, "extra_args": {"raw_logprobs": True}}
    body = {"model": "tiny", "token_ids": [1, 2, 3], "sampling_params": {**sampling, "ignore_eos": True}}
    async with client.post("/inference/v1/generate", json=body) as response:
        assert response.headers["X-Policy-Version"] == "0"
        answer = await response.json()
    [choice] = answer["choices"]
    tokens = choice["token_ids"]
    assert (len(tokens), choice["finish_reason"], choice["stop_reason"]) == (9, "length", None)
    assert choice["version_spans"] == [[0, 9, 0]]
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 9}]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    logprobs = unpack(choice["completion_logprobs"])
    np.testing.assert_allclose(logprobs, full_forward(model, [1, 2, 3], tokens, 0.7), atol=1e-4)
    np.testing.assert_allclose(unpack(choice["raw_logprobs"]), full_forward(model, [1, 2, 3], tokens), atol=1e-4)
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in tokens]
    assert np.array_equal(np.array([entry["logprob"] for entry in content], np.float32), logprobs)


async def test_generate_omits_what_was_not_asked_for(serve: Start) -> None:
    client = await serve()
    plain = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
    _, answer = await post(client, "/inference/v1/generate", plain)
    assert answer["choices"][0]["logprobs"] is None
    assert "completion_logprobs" not in answer["choices"][0]
    packed = {"max_tokens": 2, "logprobs": 1, "extra_args": {"packed_logprobs": True}}
    _, answer = await post(client, "/inference/v1/generate", {"token_ids": [1], "sampling_params": packed})
    assert answer["choices"][0]["logprobs"] is None
    assert len(unpack(answer["choices"][0]["completion_logprobs"])) == len(answer["choices"][0]["token_ids"])


async def test_generate_gives_n_different_completions_that_a_seed_repeats(serve: Start) -> None:
    client = await serve()
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 12, "n": 3, "seed": 5, "ignore_eos": True}}
    _, first = await post(client, "/inference/v1/generate", body)
    _, again = await post(client, "/inference/v1/generate", body)
    made = [choice["token_ids"] for choice in first["choices"]]
    assert made == [choice["token_ids"] for choice in again["choices"]]
    assert len({tuple(tokens) for tokens in made}) == 3
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]


async def test_generate_reports_alternatives_and_marks_removed_ones(serve: Start) -> None:
    client = await serve()
    sampling = {"max_tokens": 3, "logprobs": 4, "top_k": 2, "ignore_eos": True}
    _, answer = await post(client, "/inference/v1/generate", {"token_ids": [1], "sampling_params": sampling})
    for entry in answer["choices"][0]["logprobs"]["content"]:
        tops = entry["top_logprobs"]
        assert len(tops) == 4
        assert [top["logprob"] for top in tops[2:]] == [-9999.0, -9999.0]
        assert entry["token"] in {top["token"] for top in tops[:2]}


async def test_generate_streams_a_chunk_a_token(serve: Start) -> None:
    client = await serve()
    body = {"token_ids": [1], "stream": True, "sampling_params": {"max_tokens": 4, "n": 2, "ignore_eos": True}}
    choices = [event["choices"][0] for event in await events(client, "/inference/v1/generate", body)]
    assert sorted(choice["index"] for choice in choices) == [0] * 4 + [1] * 4
    assert sum(choice["finish_reason"] == "length" for choice in choices) == 2


async def test_max_tokens_beyond_the_context_is_lowered(serve: Start) -> None:
    client = await serve()
    body = {"token_ids": [1] * 90, "sampling_params": {"max_tokens": 1000, "ignore_eos": True}}
    _, answer = await post(client, "/inference/v1/generate", body)
    assert len(answer["choices"][0]["token_ids"]) == 6


async def test_token_route_takes_what_a_harness_with_tools_passes_through(serve: Start) -> None:
    """A harness renders tools itself; what else its sampling parameters carry says nothing about how to sample."""
    sampling = {"max_tokens": 1, "logprobs": 1, "skip_special_tokens": False, "tool_choice": "auto"}
    more = {"parallel_tool_calls": True, "reasoning_effort": None}
    body = {"model": "m", "token_ids": [1], "cache_salt": "s", "sampling_params": {**sampling, **more}}
    assert (await post(await serve(), "/inference/v1/generate", body))[0] == 200
