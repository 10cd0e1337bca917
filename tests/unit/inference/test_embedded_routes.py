"""The routes of experts that the embedded engine reports are those by which it computed the tokens."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inference_kit import EngineFactory, Start, ask, complete, make_model
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.models.logprobs import PackedPolicy
from meshrl.models.routers import RouterChoice, Routers
from meshrl.wire import completion_frame
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types.routes import Routes
from replayed import mismatches, sampled
from tiny_families import VOCAB, tiny_model

PATH = "/inference/v1/generate"
ROOM = {"max_model_len": 96, "num_slots": 8, "seed": 1}


def plain_routes(model: PreTrainedModel, tokens: list[int]) -> Routes:
    """(T, L, K) of one forward pass over a whole sequence."""
    routers, seen = Routers(model), list[RouterChoice]()
    routers.watchers.append(seen.append)
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return np.stack([choice.chosen.numpy() for choice in seen], axis=1).astype(np.uint8)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe_text"])
async def test_routes_are_those_of_a_plain_forward_pass(start_engine: EngineFactory, family: str) -> None:
    """Requests that join and leave, share prompts and come in pieces; Qwen3.5 is computed again for each token."""
    reference = tiny_model(family, attn=None)
    engine = await start_engine(tiny_model(family, attn=None), keep_routes=True, max_num_batched_tokens=16)
    rng = np.random.default_rng(0)
    shared = rng.integers(2, VOCAB, 20).tolist()
    prompts = [[*shared, *rng.integers(2, VOCAB, 1 + index % 4).tolist()] for index in range(12)]

    async def one(index: int) -> None:
        await asyncio.sleep(0.002 * (index % 3))
        start = 0 if index % 2 else len(prompts[index])
        request = ask(prompts[index], max_tokens=2 + index % 5, routed_experts_prompt_start=start)
        made = await complete(engine, request)
        tokens = [*prompts[index], *made.token_ids.tolist()]
        assert made.routed_experts is not None
        np.testing.assert_array_equal(made.routed_experts, plain_routes(reference, tokens)[start:-1])

    for group in (range(6), range(6, 12)):
        await asyncio.gather(*map(one, group))
    if family != "qwen3_5_moe_text":
        assert engine.stats().shared_prompt_tokens > 0
    plain = await complete(engine, ask(prompts[0], max_tokens=2))
    assert plain.routed_experts is None


async def test_an_engine_refuses_what_it_does_not_keep(start_engine: EngineFactory) -> None:
    engine = await start_engine()
    with pytest.raises(MeshError, match="enable_return_routed_experts") as caught:
        await complete(engine, ask([1, 2], max_tokens=2, routed_experts_prompt_start=0))
    assert caught.value.reason is Reason.NOT_SUPPORTED
    engine = await start_engine(tiny_model("mixtral", attn=None), keep_routes=True)
    with pytest.raises(MeshError, match="beyond the prompt's 2 tokens"):
        await complete(engine, ask([1, 2], max_tokens=2, routed_experts_prompt_start=3))
    with pytest.raises(ValueError, match="has no experts"):
        EmbeddedEngine(make_model(), **ROOM, keep_routes=True)


async def test_a_frame_carries_the_routes_raw(start_engine: EngineFactory, serve: Start) -> None:
    client = await serve(await start_engine(tiny_model("mixtral", attn=None), keep_routes=True))
    sampling = {"max_tokens": 3, "logprobs": 1, "ignore_eos": True, "routed_experts_prompt_start": 1}
    body = {"token_ids": [4, 5, 6], "sampling_params": sampling}
    async with client.post(PATH, json=body, headers={"Accept": completion_frame.MEDIA_TYPE}) as response:
        choice = completion_frame.decode(await response.read()).choices[0]
    expected = plain_routes(tiny_model("mixtral", attn=None), [4, 5, 6, *choice.token_ids.tolist()])[1:-1]
    assert choice.routed_experts is not None
    np.testing.assert_array_equal(choice.routed_experts, expected)
    async with client.post("/v1/completions", json={"prompt": [4], "routed_experts_prompt_start": 1}) as response:
        assert "/inference/v1/generate reports them" in await response.text()


async def test_a_trainer_with_other_routers_is_nearer_to_the_engine_by_its_routes(start_engine: EngineFactory) -> None:
    """The trainer's routers are off by a hundredth of their weights; both compute in float32."""
    model = tiny_model("qwen3_moe", attn=None, num_experts=32)
    engine = await start_engine(model, keep_routes=True, max_model_len=128)
    rng = np.random.default_rng(3)
    samples = []
    for _ in range(4):
        prompt = rng.integers(2, VOCAB, 8).tolist()
        made = await complete(engine, ask(prompt, max_tokens=100, routed_experts_prompt_start=0, ignore_eos=True))
        samples.append(sampled(prompt, made.token_ids.tolist(), made.logprobs, made.routed_experts))
    replayed, without = mismatches(PackedPolicy(model), samples, off=0.01)
    assert without > 5 * replayed > 0.0
