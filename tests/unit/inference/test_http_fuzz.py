"""Requests made at random over every HTTP route: each is answered, none finds a defect, and the engine serves on."""

import json
import random
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from inference_kit import EngineFactory, make_tokenizer
from meshrl.inference.http.admin_routes import ADMIN_PATHS
from meshrl.inference.http.app import InferenceServer
from meshrl.inference.http.tokenizer import TextCodec

POSTS = ["/inference/v1/generate", "/v1/chat/completions", "/v1/completions"]
ADMIN = sorted(ADMIN_PATHS - {"/pause", "/reload_weights", "/init_broadcaster"})  # /pause would stop what follows
GETS = [
    "/health",
    "/ping",
    "/version",
    "/metrics",
    "/v1/models",
    "/is_sleeping",
    "/nothing",
    "/v1/%00",
    "//",
]
ODD: list[Any] = [
    None, True, 0, 1, 2, -1, 7.5, 1e308, 2**31, 2**63, -(2**70), "", "a", "é\u0000\n", "\ufffe", [], [1], [[1], [2]],
    [-1], [2**40], ["a"], [None], {}, {"a": 1}, {"messages": 5}, {"chat_template": "{{ 1 / 0 }}"}, "x" * 5000,
]  # fmt: skip
KEYS = [
    "n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "max_tokens", "max_completion_tokens", "seed", "stop",
    "stop_token_ids", "ignore_eos", "skip_special_tokens", "presence_penalty", "logit_bias", "prompt_logprobs",
    "stream", "extra_args", "logprobs", "top_logprobs", "stream_options", "return_token_ids", "echo", "suffix", "tools",
    "tool_choice", "response_format", "chat_template", "chat_template_kwargs", "add_generation_prompt", "model",
    "continue_final_message", "messages", "prompt", "token_ids", "sampling_params", "request_id", "features", "version",
    "weight_dir", "path", "lora_path", "lora_name", "host", "port", "return_tokens_as_token_ids", "add_special_tokens",
]  # fmt: skip
MESSAGES = [{"role": "user", "content": "ab"}]
COUNT = 200


def body(draw: random.Random, path: str) -> dict[str, Any]:
    """A sound body with some keys replaced by odd values."""
    sampling: dict[str, Any] = {"max_tokens": draw.randint(1, 3), "n": draw.randint(1, 2)}
    made: dict[str, Any] = dict(sampling)
    if path == POSTS[0]:
        made = {"token_ids": [draw.randrange(40) for _ in range(3)], "sampling_params": sampling}
    elif path == POSTS[1]:
        made["messages"] = MESSAGES
    elif path == POSTS[2]:
        made["prompt"] = draw.choice(["ab", ["a", "a"], [1, 2], [[1], [1]]])
    for _ in range(draw.randint(0, 3)):
        target = draw.choice([made, sampling])
        target[draw.choice(KEYS)] = draw.choice(ODD)
    return made


def raw(draw: random.Random, text: bytes) -> bytes:
    """Bytes that are cut, changed or no JSON at all."""
    cut = bytearray(text[: draw.randrange(len(text) + 1)])
    for _ in range(draw.randint(0, 4)):
        if cut:
            cut[draw.randrange(len(cut))] = draw.randrange(256)
    return bytes(cut) if draw.random() < 0.7 else draw.randbytes(draw.randrange(40))


async def ask(client: TestClient, draw: random.Random) -> tuple[str, int, str]:
    if draw.random() < 0.1:
        path = draw.choice(GETS)
        async with client.get(path) as response:
            return f"GET {path}", response.status, (await response.read()).decode(errors="replace")
    path = draw.choice(POSTS * 4 + ADMIN + GETS)
    data = json.dumps(body(draw, path)).encode()
    if draw.random() < 0.2:
        data = raw(draw, data)
    headers = {"Content-Type": draw.choice(["application/json"] * 8 + ["text/plain", "nonsense"])}
    if draw.random() < 0.1:
        headers["Accept"] = "application/x-meshrl-completion"
    async with client.post(path, data=data, headers=headers) as response:
        return f"POST {path} {data!r}", response.status, (await response.read()).decode(errors="replace")


@pytest.mark.parametrize("seed", [1])
async def test_no_request_finds_a_defect(start_engine: EngineFactory, seed: int, errors_said: list[str]) -> None:
    engine, draw = await start_engine(), random.Random(seed)
    codec = TextCodec(make_tokenizer(), max_prompt_bytes=1000)
    server = InferenceServer(engine, model_name="tiny", codec=codec, base_model="/nowhere")
    statuses: dict[int, int] = {}
    async with TestClient(TestServer(server.app()), timeout=aiohttp.ClientTimeout(total=60.0)) as client:
        for _ in range(COUNT):
            what, status, answer = await ask(client, draw)
            assert status < 500 or status == 503, f"{what}: {status} {answer}"
            assert "Traceback" not in answer, what
            assert '"reason": "INTERNAL"' not in answer, f"{what}: {answer}"
            if status >= 400:
                assert json.loads(answer)["error"]["message"], what
            statuses[status] = statuses.get(status, 0) + 1
        good = {"token_ids": [1], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
        async with client.post(POSTS[0], json=good) as response:
            assert response.status == 200
            assert len((await response.json())["choices"][0]["token_ids"]) == 2
    assert errors_said == []
    assert statuses[200] > COUNT // 10
    assert statuses[400] > COUNT // 10
    assert (engine.in_flight, engine.unfit) == (0, None)
