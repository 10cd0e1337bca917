"""Two runs' adapters on the same engines: each lands by itself, a late engine gets all, a closed one goes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import PreTrainedModel

from inference_kit import ask, complete, full_forward, make_model
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.models.lora import adapted_layers, adapter_state, peft_state
from meshrl.models.state import hf_state
from meshrl.weights.metrics import HubMetrics
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import Adapter, layout_signature
from meshrl.wire.types import AdapterConfig, Transport
from state_publisher import StatePublisher
from trained import apply_lora
from weight_mesh import Mesh

CONFIG = AdapterConfig(rank=4, lora_alpha=8.0, target_modules=("q_proj",))
PROMPT = [1, 2, 3]


def adapted(seed: int) -> PreTrainedModel:
    model = copy.deepcopy(make_model(0))
    apply_lora(model, rank=4, alpha=8.0, dropout=0.0, target_modules=["q_proj"])
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_A, generator=generator)
        torch.nn.init.normal_(layer.lora_B, generator=generator)
    return model


@pytest.fixture
async def new_embedded() -> AsyncIterator[Callable[[], EmbeddedEngine]]:
    torch.set_num_threads(1)
    engines: list[EmbeddedEngine] = []

    def make() -> EmbeddedEngine:
        engine = EmbeddedEngine(make_model(0), max_model_len=96, num_slots=4, seed=0, version=None)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.close()


def publisher_of(mesh: Mesh, run_id: str, engine: EmbeddedEngine, transport: Transport, **more: Any) -> StatePublisher:
    folder: Path = mesh.folder / run_id
    adapter = Adapter(config=CONFIG, base_layout=layout_signature(engine.layout()))
    return StatePublisher(mesh.client(), transport, folder, run_id=run_id, adapter=adapter, **more)


async def publish(publisher: StatePublisher, version: int, model: PreTrainedModel) -> None:
    await publisher.publish(version, dict(peft_state(adapter_state(model))))


async def serves(engine: EmbeddedEngine, policy: str, model: PreTrainedModel, version: int) -> None:
    made = await complete(engine, replace(ask(PROMPT), policy=policy))
    assert {span.version for span in made.version_spans} == {version}
    forward = full_forward(model, PROMPT, made.token_ids.tolist())
    torch.testing.assert_close(torch.from_numpy(made.logprobs), torch.from_numpy(forward), atol=1e-4, rtol=0)


def held_by(mesh: Mesh, engine: int) -> set[tuple[str, int]]:
    """The versions that the hub lists for an engine."""
    return {(held.run_id, held.version) for held in mesh.hub.list_engines("")[engine].served}


async def test_each_run_goes_its_own_way_and_a_late_engine_gets_all_of_them(
    mesh: Mesh, transport: Transport, new_embedded: Callable[[], EmbeddedEngine]
) -> None:
    engine, client = new_embedded(), mesh.client()
    mesh.start_agent("e0", engine)
    await mesh.until_registered()
    models = {("a", 0): adapted(1), ("b", 5): adapted(2), ("b", 6): adapted(3)}
    publishers = {run_id: publisher_of(mesh, run_id, engine, transport) for run_id in "ab"}
    for (run_id, version), model in models.items():
        await publish(publishers[run_id], version, model)
        done = await client.activate_version(run_id=run_id, version=version, prepare_deadline_s=30.0)
        assert done.engines[0].applied.pause_s == 0.0
        await serves(engine, run_id, model, version)
    await serves(engine, "a", models["a", 0], 0)  # as before b moved on
    assert engine.stats().last_pause_s == 0.0
    (info,) = mesh.hub.list_engines("")
    await mesh.until(
        lambda: {(s.run_id, s.version) for s in mesh.hub.list_engines("")[0].served} == {("a", 0), ("b", 6)}
    )
    shown = CollectorRegistry()
    shown.register(HubMetrics(mesh.hub.coordinator))
    of_run = {
        run: [shown.get_sample_value(f"meshrl_hub_{name}", {"run": run}) for name in ("version", "engines")]
        for run in "ab"
    }
    assert of_run == {"a": [0, 1], "b": [6, 1]}
    assert (shown.get_sample_value("meshrl_hub_bytes", {"run": "a"}) or 0) > 0
    assert info.routable
    assert info.max_adapters == engine.adapters.max_adapters

    late = new_embedded()
    mesh.start_agent("e1", late)
    await mesh.until(lambda: late.adapters.newest.keys() == {"a", "b"})
    await serves(late, "a@0", models["a", 0], 0)
    await serves(late, "b@6", models["b", 6], 6)

    await mesh.restart_hub()  # from the log of both
    assert mesh.hub.coordinator.epochs == {"a": 1, "b": 1}
    await mesh.until_registered(2)
    await publish(publishers["a"], 1, models["b", 5])
    await client.activate_version(run_id="a", version=1, prepare_deadline_s=30.0)
    for each in (engine, late):
        await serves(each, "a", models["b", 5], 1)


async def test_a_closed_run_leaves_the_engines_with_its_last_request_and_may_begin_again(
    mesh: Mesh, new_embedded: Callable[[], EmbeddedEngine]
) -> None:
    engine, client = new_embedded(), mesh.client()
    mesh.start_agent("e0", engine)
    await mesh.until_registered()
    for seed, run_id in enumerate("ab", 1):
        await publish(publisher_of(mesh, run_id, engine, Transport.STREAM), 0, adapted(seed))
        await client.activate_version(run_id=run_id, version=0, prepare_deadline_s=30.0)
    stream = engine.generate(replace(ask(PROMPT, max_tokens=60), policy="a", stream=True))
    first = await anext(stream)
    await mesh.until(lambda: len(mesh.hub.list_engines("")[0].served) == 2)
    with pytest.raises(MeshError) as stale:
        await client.close_run("a", 0)
    assert stale.value.reason is Reason.INVALID_REQUEST
    await client.close_run("a", 1)
    await client.close_run("a", 1)  # again is no error
    await mesh.until(lambda: "a" not in engine.adapters.newest)
    assert [held.run_id for held in engine.adapters.served] == ["a", "b"]  # its request goes on
    rest = [chunk async for chunk in stream]
    assert {span.version for chunk in (first, *rest) for span in chunk.version_spans} == {0}
    assert [held.run_id for held in engine.adapters.served] == ["b"]
    with pytest.raises(MeshError) as gone:
        await client.get_manifest("a", 0)
    assert gone.value.reason is Reason.UNKNOWN_RUN
    await publish(publisher_of(mesh, "a", engine, Transport.STREAM, epoch=2), 0, adapted(7))
    await client.activate_version(run_id="a", version=0, prepare_deadline_s=30.0)
    await serves(engine, "a", adapted(7), 0)
    await serves(engine, "b", adapted(2), 0)


async def test_a_run_that_trains_the_base_model_has_the_hub_for_itself(
    mesh: Mesh, new_embedded: Callable[[], EmbeddedEngine]
) -> None:
    engine = new_embedded()
    await publish(publisher_of(mesh, "a", engine, Transport.STREAM), 0, adapted(1))
    with pytest.raises(
        MeshError, match="run 'run' trains the base model, which the engines also serve to a"
    ) as refused:
        await mesh.publisher(Transport.STREAM).publish(0, hf_state(make_model(0)))
    assert refused.value.reason is Reason.RUN_LIMIT_REACHED


async def test_a_stuck_version_of_one_run_holds_up_no_other(
    mesh: Mesh, new_embedded: Callable[[], EmbeddedEngine]
) -> None:
    engine, client = new_embedded(), mesh.client()
    mesh.start_agent("e0", engine)
    await mesh.until_registered()
    stuck, fine = (publisher_of(mesh, run_id, engine, Transport.STREAM) for run_id in "ab")
    wrong = {name: tensor[:1] for name, tensor in dict(peft_state(adapter_state(adapted(1)))).items()}
    await stuck.publish(0, wrong)  # its matrices do not fit
    refused = asyncio.create_task(client.activate_version(run_id="a", version=0, prepare_deadline_s=2.0))
    await publish(fine, 0, adapted(2))
    await client.activate_version(run_id="b", version=0, prepare_deadline_s=30.0)
    await serves(engine, "b", adapted(2), 0)
    with pytest.raises(MeshError) as error:
        await refused
    assert error.value.reason is Reason.ENGINES_NOT_READY
