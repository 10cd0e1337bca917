"""A tiny random Qwen3, requests to an engine or its HTTP routes, and the plain forward pass to check against."""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from http_servers import serving_http
from meshrl.inference.agent.agent import WeightAgent
from meshrl.inference.agent.states import LineMachine
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.engine import GenerateRequest, SamplingParams, TokenChunk
from meshrl.inference.http.app import InferenceServer
from meshrl.inference.http.tokenizer import TextCodec
from polling import until
from tiny_qwen3 import tiny_qwen3

VOCAB = 40


def line_of(agent: WeightAgent) -> LineMachine:
    """The agent's line of the only run."""
    (line,) = agent.machine.lines.values()
    return line


EngineFactory = Callable[..., Any]
Start = Callable[..., Awaitable[TestClient]]
ClientOf = Callable[[web.Application], Awaitable[TestClient]]


def make_model(seed: int = 0, **changes: Any) -> PreTrainedModel:
    settings = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    return tiny_qwen3(seed, **{**settings, **changes}).eval()


@asynccontextmanager
async def served(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    model_name: str = "policy",
    **settings: Any,
) -> AsyncIterator[SimpleNamespace]:
    """An embedded engine, which takes over the model, behind its HTTP server; yields `url`, `engine` and `model`."""
    torch.set_num_threads(1)
    engine = EmbeddedEngine(
        model, **{"max_model_len": 256, "num_slots": 8, "eos_token_ids": (2,), "seed": 0, "version": 0, **settings}
    )
    engine.start()
    codec = None if tokenizer is None else TextCodec(tokenizer)
    app = InferenceServer(engine, model_name=model_name, codec=codec).app()
    async with serving_http(app, handler_cancellation=True) as url:
        yield SimpleNamespace(url=url, engine=engine, model=model)
    await engine.close()


def ask(prompt: list[int] | tuple[int, ...], *, stream: bool = False, **params: Any) -> GenerateRequest:
    params.setdefault("max_tokens", 8)
    return GenerateRequest(
        request_id="test", prompt_ids=tuple(prompt), sampling=SamplingParams(**params), stream=stream
    )


async def collect(engine: EmbeddedEngine, request: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request)]


async def complete(engine: EmbeddedEngine, request: GenerateRequest) -> TokenChunk:
    chunks = await collect(engine, request)
    assert len(chunks) == 1
    return chunks[0]


def pause_after(engine: EmbeddedEngine, steps: int) -> None:
    """Has the engine pause by itself after so many steps: a test's own pause may come too late."""
    runner, left = engine._steps.runner, [steps]
    step = runner.step

    def counted(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            engine._steps.paused = True
        return step(*args)

    runner.step = counted  # type: ignore[method-assign]  # of this one runner, for its life


async def until_in_flight(engine: EmbeddedEngine, count: int) -> None:
    await until(lambda: engine.in_flight >= count)


def full_forward(model: PreTrainedModel, prompt: list[int], completion: list[int], temperature: float = 1.0) -> Any:
    """(T,) logprobs of the completion by one plain forward pass over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].float()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(completion)[:, None])[:, 0].numpy()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes "a".."z", some signs and the two bytes of an e with an accent: ids 0 to 39; 0 ends a text."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    byte_names = ["</s>", *letters, ":", "Ċ", "Ã", "©", "Ġ", ".", "!", "?", "0", "1", "2", "3", "4"]
    vocabulary = {name: index for index, name in enumerate(byte_names)}
    assert len(vocabulary) == VOCAB
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}t:{{ tool.function.name }}\n{% endfor %}"
        "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return tokenizer


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
