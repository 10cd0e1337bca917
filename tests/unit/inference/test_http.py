"""The HTTP routes through aiohttp's test client, over a real engine."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from inference_kit import VOCAB, EngineFactory, full_forward, make_model, make_tokenizer
from transformers import PreTrainedModel

from meshrl.inference.checkpoints import WeightLoader
from meshrl.inference.embedded import EmbeddedEngine
from meshrl.inference.http import InferenceServer
from meshrl.inference.text import TextCodec, TextStream

Start = Callable[..., Awaitable[TestClient]]
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture
async def serve(start_engine: EngineFactory, tmp_path: Path) -> AsyncIterator[Start]:
    clients: list[TestClient] = []
    codec = TextCodec(make_tokenizer())

    async def start(engine: EmbeddedEngine | None = None, base_model: str = "", **settings: Any) -> TestClient:
        engine = engine or await start_engine(eos_token_ids=(0,))
        server = InferenceServer(
            engine, model_name="tiny", codec=codec, loader=WeightLoader(engine, base_model), **settings
        )
        client = TestClient(TestServer(server.app()))
        await client.start_server()
        clients.append(client)
        return client

    yield start
    for client in clients:
        await client.close()


async def post(client: TestClient, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
    async with client.post(path, json=body, **kwargs) as response:
        return response.status, await response.json()


async def events(client: TestClient, path: str, body: Any) -> list[Any]:
    async with client.post(path, json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def unpack(field: dict[str, Any]) -> np.ndarray:
    assert field["dtype"] == "float32"
    return np.frombuffer(base64.b64decode(field["data"]), "<f4")


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


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/inference/v1/generate", {"token_ids": [1] * 96}, "maximum context length is 96"),
        ("/inference/v1/generate", {"token_ids": []}, "0 tokens"),
        ("/inference/v1/generate", {}, "token_ids: Field required"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"stop": ["x"]}}, "use stop_token_ids"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"image": 1}}, "text models only"),
        ("/inference/v1/generate", {"token_ids": [VOCAB]}, "token ids must be in"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 0}, "n: "),
        ("/v1/completions", {"prompt": "a", "presence_penalty": 1.0}, "presence_penalty is not supported"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": []}, "empty list"),
    ],
)
async def test_bad_input_is_answered_with_what_to_change(path: str, body: Any, words: str, serve: Start) -> None:
    status, answer = await post(await serve(), path, body)
    assert status == 400
    assert words in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


async def test_broken_json_and_unknown_routes_are_json_errors(serve: Start) -> None:
    client = await serve()
    async with client.post("/v1/completions", data=b"{") as response:
        assert response.status == 400
        assert "Invalid JSON" in (await response.json())["error"]["message"]
    async with client.get("/nothing") as response:
        assert response.status == 404
        assert "/nothing" in (await response.json())["error"]["message"]


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
    ],
)
async def test_what_would_be_ignored_is_refused(serve: Start, fields: dict[str, Any]) -> None:
    client = await serve()
    status, answer = await post(client, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **fields})
    assert status == 400
    assert next(iter(fields)).replace("functions", "tools") in answer["error"]["message"]
    assert "leave them out" in answer["error"]["message"]
    if "response_format" in fields:
        assert (await post(client, "/v1/completions", {"prompt": "a", "max_tokens": 1, **fields}))[0] == 400


async def test_neutral_values_of_what_is_not_supported_are_taken(serve: Start) -> None:
    fields = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "structured_outputs": None}
    status, _ = await post(await serve(), "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **fields})
    assert status == 200


async def test_token_route_takes_what_a_harness_with_tools_passes_through(serve: Start) -> None:
    """A harness renders tools itself; what else its sampling parameters carry says nothing about how to sample."""
    sampling = {"max_tokens": 1, "logprobs": 1, "skip_special_tokens": False, "tool_choice": "auto"}
    more = {"parallel_tool_calls": True, "reasoning_effort": None}
    body = {"model": "m", "token_ids": [1], "cache_salt": "s", "sampling_params": {**sampling, **more}}
    assert (await post(await serve(), "/inference/v1/generate", body))[0] == 200


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
        assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]


async def test_models_health_version_and_metrics(serve: Start) -> None:
    client = await serve()
    card = (await (await client.get("/v1/models")).json())["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 96)
    assert (await client.get("/health")).status == 200
    assert await (await client.get("/version")).json() == {
        "version": 0,
        "root": "",
        "paused": False,
        "in_flight": 0,
        "logprobs_mode": "processed_logprobs",
    }
    assert "meshrl_engine_slots 8" in await (await client.get("/metrics")).text()


async def test_health_is_503_while_draining(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine()
    client = await serve(engine)
    engine.begin_drain()
    async with client.get("/health") as response:
        assert response.status == 503
    status, answer = await post(client, "/inference/v1/generate", {"token_ids": [1]})
    assert (status, answer["error"]["reason"]) == (503, "DRAINING")


async def test_a_full_queue_is_429_with_retry_after(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine(num_slots=1, max_queue=0)
    client = await serve(engine)
    await engine.pause()
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    running = asyncio.create_task(post(client, "/inference/v1/generate", body))
    await asyncio.sleep(0.05)
    async with client.post("/inference/v1/generate", json=body) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
    await engine.resume()
    assert (await running)[0] == 200


async def test_a_client_that_leaves_frees_its_slot(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine()
    client = await serve(engine)
    await engine.pause()
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    request = asyncio.create_task(post(client, "/inference/v1/generate", body))
    await asyncio.sleep(0.05)
    assert engine.in_flight == 1
    request.cancel()
    await asyncio.wait_for(engine.idle(), 30.0)
    await engine.resume()
    assert engine.stats().finished_requests == 0


async def test_a_request_past_its_deadline_is_504(serve: Start, start_engine: EngineFactory) -> None:
    engine = await start_engine()
    client = await serve(engine, request_deadline_s=0.05)
    await engine.pause()
    status, answer = await post(client, "/inference/v1/generate", {"token_ids": [1]})
    assert (status, answer["error"]["reason"]) == (504, "DEADLINE_PASSED")
    await engine.resume()


async def test_the_api_key_guards_all_but_health(serve: Start) -> None:
    client = await serve(api_key="secret")
    status, answer = await post(client, "/inference/v1/generate", {"token_ids": [1]})
    assert (status, answer["error"]["type"]) == (401, "authentication_error")
    headers = {"Authorization": "Bearer secret"}
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    assert (await post(client, "/inference/v1/generate", body, headers=headers))[0] == 200
    assert (await client.get("/health")).status == 200
    assert (await client.get("/v1/models")).status == 401


async def test_weights_are_updated_from_disk_and_reloaded(serve: Start, tmp_path: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(tmp_path / "base")
    make_model(seed=9).save_pretrained(tmp_path / "new")
    client = await serve(base_model=str(tmp_path / "base"))
    greedy = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 8, "temperature": 0, "ignore_eos": True}}
    before = (await post(client, "/inference/v1/generate", greedy))[1]["choices"][0]
    status, updated = await post(client, "/update_weights", {"weight_dir": str(tmp_path / "new")})
    assert (status, updated["version"]) == (200, 1)
    after = (await post(client, "/inference/v1/generate", greedy))[1]["choices"][0]
    assert after["token_ids"] != before["token_ids"]
    assert after["version_spans"] == [[0, 8, 1]]
    assert (await (await client.get("/version")).json())["root"] == updated["root"] != ""
    status, reloaded = await post(client, "/reload_weights", {})
    assert (status, reloaded["version"]) == (200, 0)
    assert (await post(client, "/inference/v1/generate", greedy))[1]["choices"][0] == before


async def test_a_folder_without_a_fitting_checkpoint_is_refused(serve: Start, tmp_path: Path) -> None:
    client = await serve()
    status, answer = await post(client, "/update_weights", {"path": str(tmp_path)})
    assert status == 400
    assert "no *.safetensors" in answer["error"]["message"]
    make_model(hidden_size=16).save_pretrained(tmp_path / "other")
    status, answer = await post(client, "/update_weights", {"path": str(tmp_path / "other")})
    assert (status, answer["error"]["reason"]) == (400, "LAYOUT_MISMATCH")
    assert (await (await client.get("/version")).json())["version"] == 0


async def test_pause_and_resume_over_http(serve: Start) -> None:
    client = await serve()
    assert (await post(client, "/pause", None))[1] == {"status": "paused", "in_flight": 0}
    assert (await (await client.get("/version")).json())["paused"] is True
    running = asyncio.create_task(post(client, "/inference/v1/generate", {"token_ids": [1]}))
    await asyncio.sleep(0.05)
    assert not running.done()
    assert (await post(client, "/resume", None))[1] == {"status": "running", "in_flight": 1}
    assert (await running)[0] == 200


async def test_admin_routes_answer_this_host_only(serve: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiohttp.web.BaseRequest.remote", "10.1.2.3")
    client = await serve()
    for path in ("/pause", "/resume", "/update_weights", "/reload_weights"):
        status, answer = await post(client, path, {})
        assert (status, answer["error"]["type"]) == (403, "permission_error")
    assert (await client.get("/health")).status == 200


def test_text_streams_hold_back_half_characters_and_half_stop_strings() -> None:
    codec = TextCodec(make_tokenizer())
    ids = make_tokenizer().encode("xaé", add_special_tokens=False)
    assert len(ids) == 4  # the last character is two bytes
    stream = TextStream(codec, skip_special_tokens=True, stops=("ab",))
    assert [stream.push([each]) for each in ids] == ["x", "", "", "aé"]
    stream = TextStream(codec, skip_special_tokens=True, stops=("ab",))
    assert [stream.push([each]) for each in make_tokenizer().encode("xab", add_special_tokens=False)] == ["x", "", ""]
    assert stream.stopped
