"""Mixtures of experts: engines keep their weights in forms of their own, and versions must come out the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_mesh import EngineClient, EngineMesh, reference
from meshrl.wire.types import Transport
from plain_checks import check_greedy
from plain_model import logits_of

PROMPTS = ([1, 2, 3], [1 + index % 63 for index in range(400)])


@pytest.fixture(scope="module", params=["embedded", "vllm"])
def mixture_mesh(request: pytest.FixtureRequest, start_mesh: Callable[..., EngineMesh]) -> EngineMesh:
    return start_mesh(request.param, mixture=True)


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
