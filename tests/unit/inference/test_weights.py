"""Weight versions that change under requests in flight."""

import asyncio

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from inference_kit import EngineFactory, ask, complete, full_forward, make_model, pause_after, until_in_flight
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.embedded.staging import LiveWeights, Staging
from meshrl.inference.engine import HostVersion
from meshrl.models.state import hf_state
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import VersionSpan
from polling import until


async def swap(engine: EmbeddedEngine, version: int, weights: PreTrainedModel, root: bytes = b"root") -> None:
    await engine.stage(HostVersion(version=version, tensors=hf_state(weights)))
    await engine.pause()
    await engine.apply(version, root)
    await engine.resume()


async def test_new_weights_apply_between_two_steps_and_spans_say_where(
    model: PreTrainedModel, start_engine: EngineFactory
) -> None:
    engine = await start_engine()
    other = make_model(seed=9)
    pause_after(engine, steps=6)  # one for the prompt
    stream = engine.generate(ask([1, 2, 3], max_tokens=20, stream=True))
    early = [await anext(stream) for _ in range(5)]
    assert await engine.pause() == 1
    await engine.stage(HostVersion(version=4, tensors=hf_state(other)))
    await engine.apply(4, b"four")
    assert (engine.version, engine.root, engine.paused) == (4, b"four", True)
    await engine.resume()
    chunks = [*early, *[chunk async for chunk in stream]]
    spans = [span for chunk in chunks for span in chunk.version_spans]
    versions = [span.version for span in spans]
    assert versions == [0] * 5 + [4] * 15
    tokens = [int(chunk.token_ids[0]) for chunk in early]
    logprobs = np.concatenate([chunk.logprobs for chunk in early])
    np.testing.assert_allclose(logprobs, full_forward(model, [1, 2, 3], tokens), atol=1e-4)

    whole = await complete(engine, ask([1, 2, 3], max_tokens=20))
    assert [(span.start, span.end, span.version) for span in whole.version_spans] == [(0, 20, 4)]
    np.testing.assert_allclose(whole.logprobs, full_forward(other, [1, 2, 3], whole.token_ids.tolist()), atol=1e-4)


async def test_a_version_that_finds_no_memory_is_refused_by_its_own_reason_with_what_to_set() -> None:
    model = make_model()
    model.model.norm.weight = nn.Parameter(torch.ones(1).expand(2**44))  # no bytes here, 64 TiB once copied
    staging = Staging(LiveWeights(model), torch.device("cpu"))
    with pytest.raises(MeshError) as caught:
        await staging.stage(HostVersion(version=3, tensors=hf_state(model)))
    assert caught.value.reason is Reason.OUT_OF_MEMORY
    assert caught.value.message.startswith(
        f"staging version 3 ran out of memory on cpu: {2**46} bytes more were asked for; lower inference.kv_cache_bytes"
    )


async def test_staging_does_not_stop_generation_and_changes_nothing(
    model: PreTrainedModel, start_engine: EngineFactory
) -> None:
    engine = await start_engine()
    await engine.stage(HostVersion(version=1, tensors=hf_state(make_model(seed=3))))
    made = await complete(engine, ask([1, 2, 3], max_tokens=10))
    np.testing.assert_allclose(made.logprobs, full_forward(model, [1, 2, 3], made.token_ids.tolist()), atol=1e-4)
    assert engine.version == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("model.norm.weight"), "missing model.norm.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "unknown extra"),
        (lambda state: state.update({"model.norm.weight": torch.zeros(3)}), r"float32 \(32,\), got float32 \(3,\)"),
        (
            lambda state: state.update({"model.norm.weight": state["model.norm.weight"].to(torch.bfloat16)}),
            "got bfloat16",
        ),
    ],
)
async def test_weights_that_do_not_fit_are_refused_and_the_old_version_serves(
    change: object, words: str, start_engine: EngineFactory
) -> None:
    engine = await start_engine()
    state = dict(hf_state(make_model(seed=3)))
    change(state)  # type: ignore[operator]  # a lambda of the table above
    with pytest.raises(MeshError, match=words) as refused:
        await engine.stage(HostVersion(version=1, tensors=state))
    assert refused.value.reason is Reason.LAYOUT_MISMATCH
    await engine.pause()
    with pytest.raises(MeshError) as unstaged:
        await engine.apply(1, b"")
    assert unstaged.value.reason is Reason.VERSION_NOT_SEALED
    await engine.resume()
    assert len((await complete(engine, ask([1]))).token_ids) == 8


async def test_weights_apply_only_while_paused(start_engine: EngineFactory) -> None:
    engine = await start_engine()
    await engine.stage(HostVersion(version=1, tensors=hf_state(make_model(seed=3))))
    with pytest.raises(MeshError, match="pause first"):
        await engine.apply(1, b"")
    assert engine.version == 0
    assert engine.unfit is None


async def test_a_failed_apply_leaves_the_engine_unfit_until_it_is_reseeded(
    start_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start_engine()
    await engine.pause()
    running = asyncio.create_task(complete(engine, ask([1])))
    await until_in_flight(engine, 1)
    await engine.stage(HostVersion(version=1, tensors=hf_state(make_model(seed=3))))
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise RuntimeError("out of memory")

        patch.setattr(LiveWeights, "swap", fail)
        with pytest.raises(MeshError, match="out of memory") as failed:
            await engine.apply(1, b"")
    assert failed.value.reason is Reason.ENGINE_FAILED
    assert engine.unfit is not None
    with pytest.raises(MeshError, match="out of memory"):
        await running
    with pytest.raises(MeshError, match="must be reseeded"):
        await complete(engine, ask([1]))
    await swap(engine, 2, make_model(seed=3))
    assert engine.unfit is None
    assert len((await complete(engine, ask([1]))).token_ids) == 8


async def test_the_root_is_that_of_the_live_bytes(start_engine: EngineFactory) -> None:
    engine = await start_engine()
    other = make_model(seed=3)
    before = await engine.weights_root()
    await swap(engine, 1, other)
    assert await engine.weights_root() == LiveWeights(other).root()
    assert await engine.weights_root() != before
    names = [name for name, _, _ in engine.layout()]
    assert names == sorted(names)
    assert "lm_head.weight" not in names  # tied to the embeddings


async def test_an_engine_without_a_version_serves_only_after_it_has_one(start_engine: EngineFactory) -> None:
    engine = await start_engine(version=None)
    with pytest.raises(MeshError) as refused:
        await complete(engine, ask([1]))
    assert refused.value.reason is Reason.VERSION_NOT_AVAILABLE
    await engine.adopt(7, b"seven")
    made = await complete(engine, ask([1]))
    assert {span.version for span in made.version_spans} == {7}
    assert (engine.version, engine.root) == (7, b"seven")


async def test_prompt_that_an_older_version_computed_is_said(start_engine: EngineFactory) -> None:
    engine = await start_engine(max_num_batched_tokens=1, version=3)
    pause_after(engine, steps=1)
    request = ask(list(range(20)), max_tokens=4, ignore_eos=True)
    running = asyncio.create_task(complete(engine, request))
    await until(lambda: engine.stats().prefilled_tokens == 1)
    await swap(engine, 4, make_model(seed=4))
    assert (await running).version_spans == (VersionSpan(start=0, end=4, version=4, prompt_version=3),)
    assert (await complete(engine, request)).version_spans == (VersionSpan(start=0, end=4, version=4),)
