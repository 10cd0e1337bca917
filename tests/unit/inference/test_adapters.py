"""LoRA versions on the embedded engine: merged as the trainer merges them, always into the base weights."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from group_senders import GroupSenders
from inference_kit import EngineFactory, ask, complete, full_forward
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.embedded.live_weights import LiveWeights
from meshrl.inference.engine import HostVersion
from meshrl.models.lora import adapted_layers, adapter_state, apply_lora
from meshrl.models.state import hf_state
from meshrl.versions.peft import PREFIX
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import Adapter, layout_signature
from meshrl.wire.types import AdapterConfig

RANK, ALPHA = 4, 6.0

Senders = Callable[..., GroupSenders]


def trained(model: PreTrainedModel, seed: int, *targets: str) -> PreTrainedModel:
    """A copy of the model with adapters whose matrices are not zero."""
    copied = copy.deepcopy(model)
    apply_lora(copied, rank=RANK, alpha=ALPHA, dropout=0.0, target_modules=targets)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(copied).values():
            layer.lora_A.normal_(generator=generator)
            layer.lora_B.normal_(generator=generator)
    return copied


def published(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {f"{PREFIX}{name}.weight": tensor for name, tensor in adapter_state(model).items()}


def version_of(model: PreTrainedModel, version: int, *targets: str) -> HostVersion:
    adapter = AdapterConfig(rank=RANK, lora_alpha=ALPHA, target_modules=targets)
    return HostVersion(version=version, tensors=published(model), adapter=adapter)


async def serve(engine: EmbeddedEngine, host: HostVersion) -> None:
    await engine.stage(host)
    await engine.pause()
    await engine.apply(host.version, b"root")
    await engine.resume()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def base(request: pytest.FixtureRequest, model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).to(request.param)


async def test_served_weights_are_the_trainers_merged_ones_to_the_bit(
    start_engine: EngineFactory, base: PreTrainedModel
) -> None:
    engine = await start_engine(base)
    trainer = trained(base, 1, "q_proj", "down_proj")
    await serve(engine, version_of(trainer, 1, "down_proj", "q_proj"))
    expected = copy.deepcopy(base)
    expected.load_state_dict(hf_state(trainer), strict=False)
    assert await engine.weights_root() == LiveWeights(expected).root()
    assert await engine.weights_root() != LiveWeights(base).root()
    made = await complete(engine, ask([1, 2, 3], max_tokens=8))
    assert {span.version for span in made.version_spans} == {1}
    if base.dtype is torch.float32:
        forward = full_forward(expected, [1, 2, 3], made.token_ids.tolist())
        torch.testing.assert_close(torch.from_numpy(made.logprobs), torch.from_numpy(forward), atol=1e-4, rtol=0)


async def test_next_adapter_is_merged_into_the_base_and_not_into_the_one_before(
    start_engine: EngineFactory, model: PreTrainedModel
) -> None:
    engine = await start_engine()
    await serve(engine, version_of(trained(model, 1, "q_proj", "down_proj"), 1, "down_proj", "q_proj"))
    second = trained(model, 2, "q_proj")  # and down_proj goes back to the base
    await serve(engine, version_of(second, 2, "q_proj"))
    expected = copy.deepcopy(model)
    expected.load_state_dict(hf_state(second), strict=False)
    assert await engine.weights_root() == LiveWeights(expected).root()


async def test_whole_version_is_the_base_of_later_adapters(start_engine: EngineFactory, model: PreTrainedModel) -> None:
    engine = await start_engine()
    await serve(engine, version_of(trained(model, 1, "q_proj"), 1, "q_proj"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(2)
    await serve(engine, HostVersion(version=2, tensors=hf_state(other)))
    assert await engine.weights_root() == LiveWeights(other).root()
    again = trained(other, 3, "q_proj")
    await serve(engine, version_of(again, 3, "q_proj"))
    expected = copy.deepcopy(other)
    expected.load_state_dict(hf_state(again), strict=False)
    assert await engine.weights_root() == LiveWeights(expected).root()


async def test_adapter_comes_through_a_group_as_well(
    start_engine: EngineFactory, model: PreTrainedModel, new_senders: Senders
) -> None:
    engine, senders = await start_engine(), new_senders()
    trainer = trained(model, 1, "q_proj")
    adapter = AdapterConfig(rank=RANK, lora_alpha=ALPHA, target_modules=("q_proj",))
    layout = layout_signature(engine.layout())
    parcel = senders.parcel(1, published(trainer), adapter=Adapter(config=adapter, base_layout=layout))
    await asyncio.gather(engine.join_group(senders.group(1)), senders.meet(1))
    await asyncio.gather(engine.receive(parcel.manifest), senders.send(parcel))
    await engine.pause()
    await engine.apply(1, parcel.manifest.result_root)
    await engine.resume()
    expected = copy.deepcopy(model)
    expected.load_state_dict(hf_state(trainer), strict=False)
    assert await engine.weights_root() == LiveWeights(expected).root()


Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{Q}.lora_B.weight"), "only one of lora_A and lora_B"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(RANK + 1, 32)}), r"\(4, 32\) for rank 4, got \(5, 32\)"),
        (lambda t: t.update({f"{PREFIX}model.layers.9.mlp.lora_A.weight": torch.zeros(RANK, 32)}), "layers.9"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32)}), "no name of PEFT's"),
        (lambda t: t.clear(), "empty"),
    ],
)
async def test_adapter_that_does_not_fit_is_refused(
    start_engine: EngineFactory, model: PreTrainedModel, change: Callable[..., object], words: str
) -> None:
    engine = await start_engine()
    before = await engine.weights_root()
    host = version_of(trained(model, 1, "q_proj"), 1, "q_proj")
    change(host.tensors)
    with pytest.raises(MeshError, match=words) as refused:
        await engine.stage(host)
    assert refused.value.reason is Reason.LAYOUT_MISMATCH
    assert await engine.weights_root() == before
    assert engine.version == 0
