"""Mixtures of experts: engines keep their weights in forms of their own, and versions must come out the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine_mesh import EngineClient, EngineMesh, reference
from meshrl.models.routers import RouterChoice, Routers
from meshrl.wire import completion_frame
from meshrl.wire.types import Transport
from meshrl.wire.types.routes import Routes
from plain_checks import check_greedy
from plain_model import logits_of

PROMPTS = ([1, 2, 3], [1 + index % 63 for index in range(400)])


@pytest.fixture(
    scope="module",
    params=[
        *(("embedded", family) for family in ("mixtral", "minimax_m2")),  # qwen3_moe is that of `routed_mesh`
        *(("vllm", family) for family in ("qwen3_moe", "mixtral", "minimax_m2")),
    ],
    ids="-".join,
)
def mixture_mesh(request: pytest.FixtureRequest, start_mesh: Callable[..., EngineMesh]) -> EngineMesh:
    """Versions name the experts of a layer as one; files of the last two families have other names in their layers."""
    engine, family = request.param
    if (engine, family) == ("vllm", "minimax_m2") and not torch.cuda.is_available():
        pytest.skip("vLLM 0.32 computes no sigmoid routers on a CPU")
    mesh = start_mesh(engine, family=family, **({"router_dtype": "float32"} if engine == "vllm" else {}))
    widened = "routers have logits in float32" in mesh.engine.log.read_text()
    assert widened == (engine == "vllm")
    return mesh


@pytest.fixture(scope="module", params=["embedded", "vllm"])
def routed_mesh(request: pytest.FixtureRequest, start_mesh: Callable[..., EngineMesh]) -> EngineMesh:
    if request.param == "vllm" and not torch.cuda.is_available():
        pytest.skip("vLLM reports routes by its second model runner, which needs Triton, and so a GPU")
    return start_mesh(request.param, family="qwen3_moe", enable_return_routed_experts=True)


async def check_served(mesh: EngineMesh) -> None:
    async with mesh.session() as session:
        client = EngineClient(session)
        for prompt in PROMPTS:
            choice = await client.greedy(prompt)
            assert choice["version_spans"] == [[0, 40, mesh.version]]
            check_greedy(mesh.kind, logits_of(reference(mesh), prompt, choice["token_ids"]), choice)


async def test_each_version_is_the_plain_mixture_of_its_weights(mixture_mesh: EngineMesh) -> None:
    for seed, transport in ((0, Transport.FILESYSTEM), (1, Transport.STREAM), (0, Transport.FILESYSTEM)):
        await mixture_mesh.publish(seed, transport=transport)
        await check_served(mixture_mesh)


def plain_routes(mesh: EngineMesh, tokens: list[int]) -> Routes:
    """(T, L, K) of one forward pass of the plain mixture."""
    model, seen = reference(mesh), list[RouterChoice]()
    routers = Routers(model)
    routers.watchers.append(seen.append)
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return np.stack([choice.chosen.numpy() for choice in seen], axis=1).astype(np.uint8)


async def test_routes_are_those_of_the_plain_mixture(routed_mesh: EngineMesh) -> None:
    """Whole and from a token of the prompt on, again where the prompt is in the engine's cache, and after a version."""
    for seed, transport in ((2, Transport.FILESYSTEM), (3, Transport.STREAM)):
        await routed_mesh.publish(seed, transport=transport)
        await check_served(routed_mesh)
        async with routed_mesh.session() as session:
            for prompt in (*PROMPTS, PROMPTS[1]):
                for start in (0, len(prompt)):
                    sampling = {"max_tokens": 20, "ignore_eos": True, "logprobs": 1, "seed": seed}
                    body = {
                        "token_ids": list(prompt),
                        "sampling_params": {**sampling, "routed_experts_prompt_start": start},
                    }
                    headers = {"Accept": completion_frame.MEDIA_TYPE}
                    async with session.post("/inference/v1/generate", json=body, headers=headers) as response:
                        choice = completion_frame.decode(await response.read()).choices[0]
                    expected = plain_routes(routed_mesh, [*prompt, *choice.token_ids.tolist()])[start:-1]
                    assert choice.routed_experts is not None
                    assert choice.routed_experts.shape == expected.shape
                    same = np.sort(choice.routed_experts, axis=-1) == np.sort(expected, axis=-1)
                    assert same.mean() > 0.999  # experts whose scores tie but for rounding
