"""Mixtures of experts: engines keep their weights in forms of their own, and versions must come out the same.

A version whose bytes are right and whose weights the engine does not compute with is found by its probe: that is
shown on these engines, whose swaps have the most to get wrong.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stale_engine
from engine_mesh import EngineClient, EngineMesh, reference
from meshrl.models.routers import RouterChoice, Routers
from meshrl.wire import completion_frame
from meshrl.wire.types import ActivationPolicy, AgentState, Transport
from meshrl.wire.types.routes import Routes
from plain_checks import check_greedy
from plain_model import logits_of

PROMPTS = ([1, 2, 3], [1 + index % 63 for index in range(400)])
TOKENS = 15  # of each; two workers on a machine of two cores take their time for one
SLOTS = 2
ROUTED = {"enable_return_routed_experts": True}
FAULTY = {"embedded": "minimax_m2", "vllm": "mixtral"}
LENGTH = 300
WELL = 1e-3  # nats
ENGINES = pytest.mark.parametrize("engine", ["embedded", "vllm"])
DEVICE = os.environ.get("MESHRL_TEST_DEVICE", "cpu")
Start = Callable[..., EngineMesh]


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that makes the swaps of the FAULTY engines stale while it exists."""
    return tmp_path_factory.mktemp("fault") / "stale"


@pytest.fixture(scope="module")
def mixture(start_mesh: Start, fault: Path) -> Start:
    """Starts an engine of a family once: versions name the experts of a layer as one, and files of mixtral and
    minimax_m2 have other names in their layers. The fault of those that are FAULTY sleeps until its file is made."""

    @functools.cache
    def start(engine: str, family: str) -> EngineMesh:
        if (engine, family) == ("vllm", "minimax_m2") and not torch.cuda.is_available():
            pytest.skip("vLLM 0.32 computes no sigmoid routers on a CPU")
        more: dict[str, Any] = {"router_dtype": "float32"} if engine == "vllm" else dict(ROUTED)
        if (engine, family) == ("vllm", "qwen3_moe"):  # each of two workers packs its part of a layer
            more |= {"module": "patient_workers", "vllm": {"tensor_parallel_size": 2}, "lease_s": 60.0}
        with pytest.MonkeyPatch.context() as patch:
            if can_be_faulty(engine, family):
                patch.setenv(stale_engine.FAULT, str(fault))
                more |= {"module": "stale_engine", "max_num_seqs": SLOTS}
            mesh = start_mesh(engine, family=family, **more)
        widened = "routers have logits in float32" in mesh.engine.log.read_text()
        assert widened == (engine == "vllm")
        return mesh

    return start


def can_be_faulty(engine: str, family: str) -> bool:
    """vLLM's processes on a GPU are no forks of the program with the fault."""
    return family == FAULTY[engine] and (engine, DEVICE) != ("vllm", "cuda")


@pytest.fixture
def stale_mesh(mixture: Start, engine: str) -> EngineMesh:
    if not can_be_faulty(engine, FAULTY[engine]):
        pytest.skip("vLLM's processes on a GPU are no forks of the program with the fault")
    return mixture(engine, FAULTY[engine])


@pytest.fixture(scope="module", params=["embedded", "vllm"])
def routed_mesh(request: pytest.FixtureRequest, mixture: Start, start_mesh: Start) -> EngineMesh:
    if request.param == "embedded":
        return mixture("embedded", "minimax_m2")
    if not torch.cuda.is_available():
        pytest.skip("vLLM reports routes by its second model runner, which needs Triton, and so a GPU")
    return start_mesh("vllm", family="qwen3_moe", **ROUTED)


async def check_served(mesh: EngineMesh) -> None:
    async with mesh.session() as session:
        client = EngineClient(session)
        for prompt in PROMPTS:
            choice = await client.greedy(prompt, TOKENS)
            assert choice["version_spans"] == [[0, TOKENS, mesh.version]]
            check_greedy(mesh.kind, logits_of(reference(mesh), prompt, choice["token_ids"]), choice)


@pytest.mark.parametrize(
    ("engine", "family"),
    [
        ("embedded", "minimax_m2"),  # qwen3_moe is in tests/contract/trainer/test_transports.py
        *(("vllm", family) for family in ("qwen3_moe", "mixtral", "minimax_m2")),
    ],
)
async def test_each_version_is_the_plain_mixture_of_its_weights(mixture: Start, engine: str, family: str) -> None:
    mesh = mixture(engine, family)
    for seed, transport in ((0, Transport.FILESYSTEM), (1, Transport.STREAM), (0, Transport.FILESYSTEM)):
        await mesh.publish(seed, transport=transport)
        await check_served(mesh)


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


@contextmanager
def there(file: Path) -> Iterator[None]:
    file.touch()
    try:
        yield
    finally:
        file.unlink()


@ENGINES
async def test_version_is_probed_while_all_slots_are_taken(stale_mesh: EngineMesh) -> None:
    mesh = stale_mesh
    await mesh.publish(mesh.other_seed())
    async with mesh.session() as session:
        client = EngineClient(session)
        activated = asyncio.Event()

        async def ask_until_activated() -> int:
            answered = 0
            while not activated.is_set():
                await client.greedy(PROMPTS[0], LENGTH)
                answered += 1
            return answered

        askers = await client.begin(*(ask_until_activated() for _ in range(2 * SLOTS)))
        activation = await mesh.publish(mesh.other_seed())
        activated.set()
        assert all(await asyncio.gather(*askers))
    error = activation.engines[0].applied.probe_error
    assert error is not None
    assert error < WELL


@pytest.mark.parametrize(
    ("engine", "policy"),
    [
        ("embedded", ActivationPolicy.ROLLING),
        ("embedded", ActivationPolicy.GANG),  # which agent and hub do, whatever the engine
        ("vllm", ActivationPolicy.ROLLING),
    ],
    ids=lambda each: getattr(each, "value", each),
)
async def test_swap_with_stale_indices_is_refused_and_loaded_anew(
    stale_mesh: EngineMesh, fault: Path, policy: ActivationPolicy
) -> None:
    mesh = stale_mesh
    for _ in range(2):
        activation = await mesh.publish(mesh.other_seed(), policy=policy)
        error = activation.engines[0].applied.probe_error
        assert error is not None
        assert error < WELL
    seed, served = mesh.other_seed(), mesh.version + 1
    with there(fault):
        activating = asyncio.create_task(mesh.publish(seed, policy=policy))
        await mesh.until(lambda engine: engine.state is AgentState.POISONED)
        async with mesh.session() as session:
            body = {"model": "tiny", "token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 1}}
            refused = await EngineClient(session).post("/inference/v1/generate", body)
        assert refused.status == 503
        assert f"version {served} is refused: its logprobs of the version's probe are" in refused.message
    activation = await activating  # the hub has the engine load it until it is served
    assert (activation.engines[0].applied.version, mesh.version) == (served, served)
    async with mesh.session() as session:
        choice = await EngineClient(session).greedy(PROMPTS[0])
    check_greedy(mesh.kind, logits_of(reference(mesh), PROMPTS[0], choice["token_ids"]), choice)
    named = [line for line in mesh.engine.tail().splitlines() if f"applying version {served} failed" in line]
    assert len(named) == 1
    assert "weight_broadcast.max_probe_error" in named[0]
