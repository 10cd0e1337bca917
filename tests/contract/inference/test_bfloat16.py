"""vLLM in bfloat16, as it is served on GPUs: the plain model's numbers, within what rounding does to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine_mesh import EngineClient, EngineMesh, reference
from meshrl.wire.types import Transport
from plain_checks import check_greedy, check_logprobs
from plain_model import logits_of

PROMPTS = ([1, 2, 3], [1 + index % 63 for index in range(400)])


@pytest.fixture(scope="module")
def half_mesh(start_mesh: Callable[..., EngineMesh]) -> EngineMesh:
    return start_mesh("vllm", torch.bfloat16)


async def test_tokens_and_logprobs_before_and_after_an_update(half_mesh: EngineMesh) -> None:
    mesh = half_mesh
    async with mesh.session() as session:
        client = EngineClient(session)
        for seed, transport in enumerate((Transport.FILESYSTEM, Transport.STREAM)):
            await mesh.publish(seed, transport=transport)
            for prompt in PROMPTS:
                choice = await client.greedy(prompt, 200)
                check_greedy(mesh.kind, logits_of(reference(mesh), prompt, choice["token_ids"]), choice)
                choice = await client.one(prompt, temperature=0.7, max_tokens=200, seed=1)
                logits = logits_of(reference(mesh), prompt, choice["token_ids"])
                check_logprobs(mesh.kind, logits, choice, {"temperature": 0.7})
