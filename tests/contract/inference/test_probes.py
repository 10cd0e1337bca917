"""A version whose bytes are right and whose weights the engine does not compute with is found by its probe."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stale_engine
from engine_mesh import EngineClient, EngineMesh, reference
from meshrl.wire.types import ActivationPolicy, AgentState
from plain_checks import check_greedy
from plain_model import logits_of

PROMPT = [1, 2, 3]
SLOTS = 2
LENGTH = 1500
WELL = 1e-3  # nats
POLICIES = pytest.mark.parametrize(
    "policy", [ActivationPolicy.ROLLING, ActivationPolicy.GANG], ids=lambda each: each.value
)


@pytest.fixture(scope="module", params=["embedded", "vllm"])
def stale_mesh(
    request: pytest.FixtureRequest, start_mesh: Callable[..., EngineMesh], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineMesh, Path]]:
    """An engine, and the file that makes its swaps stale."""
    if (request.param, os.environ.get("MESHRL_TEST_DEVICE")) == ("vllm", "cuda"):
        pytest.skip("vLLM's processes on a GPU are no forks of the program with the fault")
    fault = tmp_path_factory.mktemp("fault") / "stale"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(stale_engine.FAULT, str(fault))
        patch.setenv("PYTHONPATH", str(Path(stale_engine.__file__).parent))
        yield start_mesh(request.param, module="stale_engine", max_num_seqs=SLOTS), fault


async def test_version_is_probed_while_all_slots_are_taken(stale_mesh: tuple[EngineMesh, Path]) -> None:
    mesh, _ = stale_mesh
    await mesh.publish(mesh.other_seed())
    async with mesh.session() as session:
        client = EngineClient(session)
        activated = asyncio.Event()

        async def ask_until_activated() -> int:
            answered = 0
            while not activated.is_set():
                await client.greedy(PROMPT, LENGTH)
                answered += 1
            return answered

        askers = [asyncio.create_task(ask_until_activated()) for _ in range(2 * SLOTS)]
        await client.until_in_flight(2 * SLOTS)
        activation = await mesh.publish(mesh.other_seed())
        activated.set()
        assert all(await asyncio.gather(*askers))
    error = activation.engines[0].applied.probe_error
    assert error is not None
    assert error < WELL


@POLICIES
async def test_swap_with_stale_indices_is_refused_and_loaded_anew(
    stale_mesh: tuple[EngineMesh, Path], policy: ActivationPolicy
) -> None:
    mesh, fault = stale_mesh
    for _ in range(2):
        activation = await mesh.publish(mesh.other_seed(), policy=policy)
        error = activation.engines[0].applied.probe_error
        assert error is not None
        assert error < WELL
    fault.touch()
    seed, served = mesh.other_seed(), mesh.version + 1
    activating = asyncio.create_task(mesh.publish(seed, policy=policy))
    try:
        await mesh.until(lambda engine: engine.state is AgentState.POISONED)
        async with mesh.session() as session:
            body = {"model": "tiny", "token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
            refused = await EngineClient(session).post("/inference/v1/generate", body)
        assert refused.status == 503
        assert f"version {served} is refused: its logprobs of the version's probe are" in refused.message
    finally:
        fault.unlink()
    activation = await activating  # the hub has the engine load it until it is served
    assert (activation.engines[0].applied.version, mesh.version) == (served, served)
    async with mesh.session() as session:
        choice = await EngineClient(session).greedy(PROMPT)
    check_greedy(mesh.kind, logits_of(reference(mesh), PROMPT, choice["token_ids"]), choice)
    named = [line for line in mesh.engine.tail().splitlines() if f"applying version {served} failed" in line]
    assert len(named) == 1
    assert "weight_broadcast.max_probe_error" in named[0]
