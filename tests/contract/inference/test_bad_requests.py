"""What cannot be served is refused with 4xx and a message that says what to change; nothing of it reaches the model."""

from __future__ import annotations

import re
from typing import Any

import aiohttp

from engine_mesh import MAX_MODEL_LEN, MODEL_NAME, EngineClient, EngineKind, EngineMesh

GENERATE, CHAT, TEXT = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "abc"}]

SAMPLING: tuple[tuple[dict[str, Any], str], ...] = (
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_k": 2**70}, "top_k"),
    ({"stop_token_ids": [64]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [64], "min_tokens": 3}, "stop_token_ids"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2.0}, "min_p"),
    ({"min_p": float("nan")}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"n": 0}, "n:"),
    ({"n": 1000}, "n:"),
    ({"seed": "seven"}, "seed"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 1000}, "logprobs"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"logit_bias": {"3": 101.0}}, "logit_bias"),
    ({"logit_bias": {"three": 1.0}}, "logit_bias"),
    ({"logit_bias": {"64": 1.0}}, "logit_bias"),
    ({"stop": "x"}, "use stop_token_ids"),
)
PROMPTS: tuple[tuple[Any, str], ...] = (
    ([], f"send 1 to {MAX_MODEL_LEN - 1} prompt tokens"),
    ([1] * MAX_MODEL_LEN, f"maximum context length is {MAX_MODEL_LEN} tokens"),
    ([1] * 5000, f"maximum context length is {MAX_MODEL_LEN} tokens"),
    ([1, 64], r"\[0, 64\)"),
    ([1, -1], r"\[0, 64\)"),
    ([2**70], r"token_ids|\[0, 64\)"),
    ([1.5], "token_ids"),
    ("abc", "token_ids"),
)


async def refused(client: EngineClient, path: str, body: Any, match: str) -> None:
    answer = await client.post(path, body)
    assert answer.status == 400, (body, answer.body)
    assert answer.body["error"]["type"] == "invalid_request_error"
    assert re.search(match, answer.message), (body, answer.message)


async def test_sampling_parameter_out_of_range(client: EngineClient) -> None:
    for sampling, match in SAMPLING:
        await refused(client, GENERATE, {"token_ids": [1, 2], "sampling_params": sampling}, match)


async def test_a_temperature_that_vllm_would_raise_is_refused_by_it(
    client: EngineClient, engine_kind: EngineKind
) -> None:
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1, "temperature": 0.005}}
    if engine_kind.name == "vllm":
        await refused(client, GENERATE, body, "temperature 0.005 would be 0.01 in vLLM")
    else:
        assert (await client.post(GENERATE, body)).status == 200
    for exact in (0.0, 0.01):
        body["sampling_params"]["temperature"] = exact
        assert (await client.post(GENERATE, body)).status == 200


async def test_prompt_that_cannot_be_served(client: EngineClient) -> None:
    for prompt, match in PROMPTS:
        await refused(client, GENERATE, {"token_ids": prompt, "sampling_params": {"max_tokens": 2}}, match)


async def test_text_routes_refuse_what_is_not_a_prompt(client: EngineClient) -> None:
    await refused(
        client,
        TEXT,
        {"model": MODEL_NAME, "prompt": "a" * 2 * MAX_MODEL_LEN},
        f"maximum context length is {MAX_MODEL_LEN} tokens",
    )
    await refused(client, TEXT, {"model": MODEL_NAME, "prompt": []}, "an empty list")
    await refused(client, TEXT, {"model": MODEL_NAME, "prompt": [1, 64]}, r"\[0, 64\)")
    await refused(client, CHAT, {"model": MODEL_NAME, "messages": []}, "messages")
    await refused(client, CHAT, {"model": MODEL_NAME, "messages": "abc"}, "messages")
    both = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 3}
    await refused(client, CHAT, both, "send one of them")
    await refused(client, TEXT, {"model": MODEL_NAME, "prompt": "abc", "echo": True}, "echo")


async def test_a_stream_is_refused_before_it_begins(client: EngineClient) -> None:
    for prompt in ([], [64]):
        await refused(client, GENERATE, {"token_ids": prompt, "stream": True}, "prompt")


async def test_body_that_is_no_object(client: EngineClient) -> None:
    for raw in (b"", b"{", b"[]", b'"abc"', b"\xff\xfe"):
        async with client.session.post(GENERATE, data=raw) as response:
            assert response.status == 400, raw
            assert "body" in (await response.json())["error"]["message"]


async def test_unknown_paths_and_methods(client: EngineClient) -> None:
    assert (await client.post("/v1/embeddings", {})).status == 404
    assert (await client.get(GENERATE)).status == 405


async def test_a_request_without_the_key_is_refused(mesh: EngineMesh) -> None:
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "open-sesame-not"}):
        async with aiohttp.ClientSession(mesh.url, headers=headers) as session:
            stranger = EngineClient(session)
            for path in (GENERATE, CHAT, TEXT):
                answer = await stranger.post(path, body)
                assert answer.status == 401
                assert "API key" in answer.message
            assert (await stranger.get("/v1/models")).status == 401
            assert (await stranger.get("/health")).status == 200


async def test_refused_requests_leave_no_trace(mesh: EngineMesh, client: EngineClient) -> None:
    version = await client.version()
    assert (version["in_flight"], version["paused"], version["version"]) == (0, False, mesh.version)
    assert (await client.get("/health")).body == {"status": "ok"}
