"""Adapters on the embedded engine: each request gets its own run's, unmerged and beside the others."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from group_senders import GroupSenders
from inference_kit import EngineFactory, ask, complete, full_forward, make_model, pause_after, until_in_flight
from meshrl.inference import adapters
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.engine import GenerateRequest, HostVersion, TokenChunk
from meshrl.inference.http.runs import join
from meshrl.models.lora import adapted_layers, adapter_state
from meshrl.versions.peft import PREFIX
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import Adapter, layout_signature
from meshrl.wire.types import AdapterConfig
from polling import until
from trained import apply_lora

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


def version_of(model: PreTrainedModel, version: int, *targets: str, run: str = "run") -> HostVersion:
    adapter = AdapterConfig(rank=RANK, lora_alpha=ALPHA, target_modules=targets)
    return HostVersion(run_id=run, version=version, tensors=published(model), adapter=adapter)


async def serve(engine: EmbeddedEngine, host: HostVersion) -> int:
    await engine.stage(host)
    return engine.adapters.serve(host.run_id, host.version, artifact_id=f"artifact {host.version}")


def asked(policy: str, prompt: list[int], **params: Any) -> GenerateRequest:
    return dataclasses.replace(ask(prompt, **params), policy=policy)


def check_logprobs(made: TokenChunk, model: PreTrainedModel, prompt: list[int], *, atol: float = 1e-4) -> None:
    """The tokens are what the trainer's own model makes of them."""
    forward = full_forward(model, prompt, made.token_ids.tolist())
    torch.testing.assert_close(torch.from_numpy(made.logprobs), torch.from_numpy(forward), atol=atol, rtol=0)


@pytest.fixture(
    params=[{}, {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}], ids=["cached", "again"]
)
def base(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model with a slot cache, and one whose every sequence is computed again for each token."""
    return make_model(**request.param)


async def test_three_runs_in_one_batch_get_each_its_own_adapter(
    start_engine: EngineFactory, base: PreTrainedModel
) -> None:
    """As the trainer's model computes each; the other rows' adapters change nothing, to the bit at the same shape."""
    runs = {name: trained(base, seed, "q_proj", "v_proj", "down_proj") for seed, name in enumerate("abc", 1)}
    others = {
        "b": trained(base, 8, "q_proj", "v_proj", "down_proj"),
        "c": trained(base, 9, "q_proj", "v_proj", "down_proj"),
    }
    prompt = list(range(1, 30))

    async def together(models: Mapping[str, PreTrainedModel]) -> dict[str, TokenChunk]:
        engine = await start_engine(base)
        for name, model in models.items():
            await serve(engine, version_of(model, 1, "down_proj", "q_proj", "v_proj", run=name))
        await engine.pause()
        made = [asyncio.create_task(complete(engine, asked(name, prompt, max_tokens=12, seed=5))) for name in "abc"]
        made.append(asyncio.create_task(complete(engine, dataclasses.replace(ask(prompt, seed=5), policy="a@1"))))
        await until_in_flight(engine, 4)
        await engine.resume()
        return dict(zip(["a", "b", "c", "again"], await asyncio.gather(*made), strict=True))

    first = await together(runs)
    for name, model in runs.items():
        check_logprobs(first[name], model, prompt)
    second = await together({"a": runs["a"], **others})
    assert first["a"].token_ids.tolist() == second["a"].token_ids.tolist()
    assert first["a"].logprobs.tobytes() == second["a"].logprobs.tobytes()
    assert not np.array_equal(first["b"].logprobs, second["b"].logprobs)


async def test_a_row_that_moves_to_where_a_broken_one_was_is_computed_without_it(start_engine: EngineFactory) -> None:
    """Its keys and values were not finite, further on than those of the row that moves, and a third row is as long."""
    base = make_model()
    engine, good, broken = await start_engine(base), trained(base, 1, "v_proj"), trained(base, 2, "v_proj")
    for layer in adapted_layers(broken).values():
        layer.lora_B.data.fill_(torch.nan)
    await serve(engine, version_of(good, 1, "v_proj", run="good"))
    await serve(engine, version_of(broken, 1, "v_proj", run="broken"))
    lengths = {"broken": 60, "long": 50, "short": 10}
    prompts = {name: [length % 7 + place % 30 for place in range(length)] for name, length in lengths.items()}
    await engine.pause()
    made = []
    for count, (name, prompt) in enumerate(prompts.items(), 1):
        policy = "broken" if name == "broken" else "good"
        made.append(asyncio.create_task(complete(engine, asked(policy, prompt, max_tokens=12))))
        await until_in_flight(engine, count)
    await engine.resume()
    refused, *rest = await asyncio.gather(*made, return_exceptions=True)
    assert isinstance(refused, MeshError)
    assert refused.reason is Reason.ENGINE_FAILED
    for name, chunk in zip(("long", "short"), rest, strict=True):
        assert isinstance(chunk, TokenChunk), chunk
        check_logprobs(chunk, good, prompts[name])


async def test_what_a_request_computed_that_was_given_up_is_not_read_by_others(start_engine: EngineFactory) -> None:
    """It leaves while its prompt is computed, by an adapter that is not finite; its slot is the next request's."""
    base = make_model()
    engine, good, broken = (
        await start_engine(base, max_num_batched_tokens=32),
        trained(base, 1, "v_proj"),
        trained(base, 2, "v_proj"),
    )
    for layer in adapted_layers(broken).values():
        layer.lora_B.data.fill_(torch.nan)
    await serve(engine, version_of(good, 1, "v_proj", run="good"))
    await serve(engine, version_of(broken, 1, "v_proj", run="broken"))
    pause_after(engine, steps=1)
    given_up = asyncio.create_task(complete(engine, asked("broken", [place % 30 for place in range(60)])))
    await until(lambda: engine.stats().prefilled_tokens > 0)
    given_up.cancel()
    await asyncio.wait({given_up})
    prompts = [[length % 7 + place % 30 for place in range(length)] for length in (10, 50)]
    made = []
    for count, prompt in enumerate(prompts, 1):
        made.append(asyncio.create_task(complete(engine, asked("good", prompt, max_tokens=12))))
        await until_in_flight(engine, count)
    await engine.resume()
    for prompt, chunk in zip(prompts, await asyncio.gather(*made), strict=True):
        check_logprobs(chunk, good, prompt)


async def test_a_request_in_flight_stays_on_its_version_and_new_ones_get_the_newer(
    start_engine: EngineFactory, model: PreTrainedModel
) -> None:
    engine = await start_engine()
    old, new = trained(model, 1, "q_proj"), trained(model, 2, "q_proj")
    await serve(engine, version_of(old, 1, "q_proj"))
    prompt = [1, 2, 3]
    stream = engine.generate(dataclasses.replace(ask(prompt, max_tokens=60), stream=True))
    chunks = [await anext(stream)]
    assert await serve(engine, version_of(new, 2, "q_proj")) == 1
    assert [(held.version, held.newest) for held in engine.adapters.served] == [(1, False), (2, True)]
    later = await complete(engine, ask(prompt))
    check_logprobs(later, new, prompt)
    chunks += [chunk async for chunk in stream]
    assert {span.version for chunk in chunks for span in chunk.version_spans} == {1}
    whole = join(chunks)
    assert len(whole.token_ids) == 60
    forward = full_forward(old, prompt, whole.token_ids.tolist())
    torch.testing.assert_close(torch.from_numpy(whole.logprobs), torch.from_numpy(forward), atol=1e-4, rtol=0)
    assert [held.version for held in engine.adapters.served] == [2]  # unloaded with its last request


async def test_a_prompts_cache_is_shared_within_one_adapter_alone(
    start_engine: EngineFactory, model: PreTrainedModel
) -> None:
    engine = await start_engine()
    for seed, name in enumerate("ab", 1):
        await serve(engine, version_of(trained(model, seed, "q_proj"), 1, "q_proj", run=name))
    prompt = list(range(1, 33))
    await engine.pause()
    tasks = [asyncio.create_task(complete(engine, asked(name, prompt))) for name in ("a", "b", "a", "b")]
    await until_in_flight(engine, 4)
    await engine.resume()
    await asyncio.gather(*tasks)
    assert engine.stats().shared_prompt_tokens == 2 * (len(prompt) - 1)


async def test_what_is_not_there_yet_is_no_unknown_model(start_engine: EngineFactory, model: PreTrainedModel) -> None:
    engine = await start_engine()
    await serve(engine, version_of(trained(model, 1, "q_proj"), 4, "q_proj", run="a"))
    for policy in ("b", "b@", "b@1", "a@5"):
        with pytest.raises(MeshError) as refused:
            await complete(engine, asked(policy, [1, 2]))
        assert refused.value.reason is Reason.VERSION_NOT_AVAILABLE
        assert refused.value.retry_after_s
    with pytest.raises(MeshError, match="version 3 of run 'a' is here no more; ask for a@4, or for 'a'") as gone:
        await complete(engine, asked("a@3", [1, 2]))
    assert (gone.value.reason, gone.value.reason.retryable) == (Reason.VERSION_SUPERSEDED, False)
    await engine.stage(version_of(trained(model, 2, "q_proj"), 5, "q_proj", run="a"))
    with pytest.raises(MeshError, match="version 5 of run 'a' is not here yet"):
        await complete(engine, asked("a@5", [1, 2]))  # loaded, and not decided
    await serve(engine, version_of(trained(model, 3, "q_proj"), 1, "q_proj", run="b"))
    with pytest.raises(MeshError, match="serves the runs a, b: name one of them"):
        await complete(engine, ask([1, 2]))


async def test_a_full_engine_waits_for_a_place_and_then_names_what_it_holds(
    start_engine: EngineFactory, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start_engine(max_adapters=2)
    for name in "ab":
        await serve(engine, version_of(trained(model, 1, "q_proj"), 1, "q_proj", run=name))
    monkeypatch.setattr(adapters, "ROOM_DEADLINE_S", 0.05)
    third = version_of(trained(model, 1, "q_proj"), 1, "q_proj", run="c")
    with pytest.raises(
        MeshError, match=r"holds 2 adapters.*a@1 \(0 requests\), b@1.*raise inference.max_loras"
    ) as full:
        await engine.stage(third)
    assert full.value.reason is Reason.OVERLOADED
    monkeypatch.setattr(adapters, "ROOM_DEADLINE_S", 30.0)
    waiting = asyncio.create_task(engine.stage(third))
    await asyncio.sleep(0)
    engine.adapters.retire("a")
    await waiting
    assert [held.run_id for held in engine.adapters.served] == ["b", "c"]


async def test_prompt_logprobs_are_of_the_requests_adapter(start_engine: EngineFactory, model: PreTrainedModel) -> None:
    engine = await start_engine()
    runs = {name: trained(model, seed, "q_proj") for seed, name in enumerate("ab", 1)}
    for name, each in runs.items():
        await serve(engine, version_of(each, 1, "q_proj", run=name))
    for name, each in runs.items():
        made = await complete(engine, asked(name, [1, 2, 3, 4], prompt_logprobs=1))
        assert made.prompt_logprobs is not None
        forward = full_forward(each, [1], [2, 3, 4])
        torch.testing.assert_close(
            torch.from_numpy(made.prompt_logprobs.logprobs[1:]), torch.from_numpy(forward), atol=1e-4, rtol=0
        )


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
    engine.adapters.serve(parcel.manifest.run_id, 1)
    check_logprobs(await complete(engine, ask([1, 2, 3])), trainer, [1, 2, 3])


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
