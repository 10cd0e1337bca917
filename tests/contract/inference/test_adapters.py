"""Versions that are LoRA adapters: each request gets its run's, from beginning to end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_mesh import EngineClient, EngineKind, EngineMesh
from meshrl.client import WeightSyncClient
from meshrl.models.lora import adapter_config, adapter_state, peft_state, save_adapter
from meshrl.wire.errors import MeshError
from meshrl.wire.manifest import Adapter, layout_signature
from meshrl.wire.types import AdapterConfig, Transport
from plain_checks import check_greedy
from plain_model import ALPHA, RANK, TARGETS, adapted_model, logits_of, plain_state, probe_of

PROMPTS = ([1, 2, 3], [1 + index % 63 for index in range(400)])
TOKENS = 12  # of an answer; two workers on a machine of two cores take their time for each
LENGTH = 200  # of a request that an adapter comes beside
LORA = {
    "vllm": {
        "module": "patient_workers",
        "vllm": {"enable_lora": True, "max_lora_rank": 8, "max_loras": 8, "tensor_parallel_size": 2},
    }
}


@pytest.fixture(scope="module")
def lora_mesh(engine_kind: EngineKind, start_mesh: Callable[..., EngineMesh]) -> EngineMesh:
    return start_mesh(engine_kind.name, **LORA.get(engine_kind.name, {}))


@pytest.fixture
async def lora_client(lora_mesh: EngineMesh) -> AsyncIterator[EngineClient]:
    torch.set_num_threads(1)
    async with lora_mesh.session() as session:
        yield EngineClient(session)


def weights_of(mesh: EngineMesh, seed: int) -> tuple[dict[str, torch.Tensor], Adapter]:
    """An adapter as a trainer publishes it."""
    state = plain_state(mesh.base_seed, mesh.kind.dtype)
    layout = [(name, mesh.kind.dtype_name, tuple(tensor.shape)) for name, tensor in state.items()]
    adapter = Adapter(
        config=AdapterConfig(rank=RANK, lora_alpha=ALPHA, target_modules=TARGETS),
        base_layout=layout_signature(layout),
    )
    return dict(peft_state(adapter_state(adapted_model(mesh.base_seed, seed)))), adapter


async def publish(mesh: EngineMesh, seed: int, transport: Transport = Transport.FILESYSTEM) -> None:
    weights, adapter = weights_of(mesh, seed)
    probe = probe_of(adapted_model(mesh.base_seed, seed))
    activation = await mesh.publish_state(weights, transport=transport, adapter=adapter, probe=probe)
    error = activation.engines[0].applied.probe_error
    assert error is not None
    assert error <= mesh.kind.logprob_mean


async def serves(mesh: EngineMesh, client: EngineClient, seed: int, version: int, **more: Any) -> None:
    for prompt in PROMPTS:
        choice = await client.greedy(prompt, TOKENS, **more)
        assert choice["version_spans"] == [[0, TOKENS, version]]
        logits = logits_of(adapted_model(mesh.base_seed, seed), prompt, choice["token_ids"])
        check_greedy(mesh.kind, logits, choice)


@pytest.mark.parametrize("transport", [Transport.FILESYSTEM, Transport.STREAM], ids=lambda each: each.value)
async def test_each_adapter_version_takes_the_place_of_the_one_before(
    lora_mesh: EngineMesh, lora_client: EngineClient, transport: Transport
) -> None:
    for seed in (1, 2):
        await publish(lora_mesh, seed, transport)
        await serves(lora_mesh, lora_client, seed, lora_mesh.version)
    if lora_mesh.kind.name == "vllm":
        parts = re.findall(r"is loaded, (\d+) parts between steps", lora_mesh.engine.log.read_text())
        assert len(parts) >= 2
        assert all(int(each) > 2 for each in parts)


async def test_adapter_that_is_not_computed_with_is_refused_and_the_next_is_served(
    lora_mesh: EngineMesh, lora_client: EngineClient
) -> None:
    """Its probe is that of another one."""
    weights, adapter = weights_of(lora_mesh, 5)
    await lora_mesh.seal(weights, adapter=adapter, probe=probe_of(adapted_model(lora_mesh.base_seed, 6)))
    async with WeightSyncClient(lora_mesh.hub_address) as hub:
        with pytest.raises(MeshError, match="the engine does not compute with them"):
            await hub.activate_version(run_id="run", version=lora_mesh.version, prepare_deadline_s=10.0)
    body = {"model": "run", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1}}
    assert (await lora_client.post("/inference/v1/generate", body)).status == 503
    await publish(lora_mesh, 6)
    await serves(lora_mesh, lora_client, 6, lora_mesh.version)


def test_adapters_need_no_second_copy_of_the_weights(lora_mesh: EngineMesh) -> None:
    if lora_mesh.kind.name == "embedded":
        pytest.skip("it makes the second copy of whole versions when one comes")
    assert "weight versions are staged as adapters" in lora_mesh.engine.log.read_text()


async def test_a_request_in_flight_stays_on_its_adapter(lora_mesh: EngineMesh, lora_client: EngineClient) -> None:
    prompt, seed = [1, 2, 3], 3
    await publish(lora_mesh, seed)
    old = lora_mesh.version
    weights, adapter = weights_of(lora_mesh, seed + 1)
    async with lora_mesh.prepared(weights, adapter=adapter) as hub:
        (running,) = await lora_client.begin(lora_client.greedy(prompt, LENGTH))
        await lora_client.one([1, 2], max_tokens=3)  # came last: by now the one before it has tokens
        await lora_mesh.activate(None, hub=hub)
    await serves(lora_mesh, lora_client, seed + 1, lora_mesh.version)
    choice = await running
    assert choice["version_spans"] == [[0, LENGTH, old]]
    check_greedy(
        lora_mesh.kind, logits_of(adapted_model(lora_mesh.base_seed, seed), prompt, choice["token_ids"]), choice
    )


async def test_three_adapters_in_one_batch_are_each_alone(
    lora_mesh: EngineMesh, lora_client: EngineClient, tmp_path: Path
) -> None:
    for seed in (6, 7, 8):
        model = adapted_model(lora_mesh.base_seed, seed)
        save_adapter(tmp_path / str(seed), adapter_state(model), adapter_config(model, "tiny"))
        body = {"lora_name": f"run-{seed}", "lora_path": str(tmp_path / str(seed)), "version": seed}
        assert (await lora_client.post("/load_lora_adapter", body)).status == 200
    calls = [serves(lora_mesh, lora_client, seed, seed, extra={"model": f"run-{seed}"}) for seed in (6, 7, 8)]
    await asyncio.gather(*calls)
    answer = await lora_client.post("/inference/v1/generate", {"model": "run-6@7", "token_ids": [1]})
    assert (answer.status, answer.body["error"]["reason"]) == (503, "VERSION_NOT_AVAILABLE")


async def test_an_adapter_is_loaded_by_hand(lora_mesh: EngineMesh, lora_client: EngineClient, tmp_path: Path) -> None:
    await publish(lora_mesh, 1)
    model = adapted_model(lora_mesh.base_seed, 5)
    save_adapter(tmp_path, adapter_state(model), adapter_config(model, "tiny"))
    body = {"lora_name": "five", "lora_path": str(tmp_path), "version": lora_mesh.version + 100}
    answer = await lora_client.post("/load_lora_adapter", body)
    assert answer.status == 200, answer.body
    assert (answer.body["version"], answer.body["lora_name"]) == (lora_mesh.version + 100, "five")
    await serves(lora_mesh, lora_client, 5, lora_mesh.version + 100, extra={"model": "five"})
