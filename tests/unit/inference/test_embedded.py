"""The engine against plain full forward passes, with requests that join, leave, wait and are cancelled."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inference_kit import VOCAB, EngineFactory, ask, complete, full_forward, make_model, until_in_flight
from meshrl.core.config import load_config
from meshrl.core.config.dump import dump_toml
from meshrl.core.config.shared import ModelConfig, WeightBroadcastConfig
from meshrl.inference import build
from meshrl.inference.build import build_engine
from meshrl.inference.config import InferenceConfig
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.embedded.slots import MIN_SHARED_TOKENS
from meshrl.inference.engine import FinishReason, GenerateRequest, HostVersion
from meshrl.machine.memory import MachineMemory
from meshrl.wire.errors import MeshError, Reason
from polling import until

TOLERANCE = 1e-4


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


async def test_ragged_requests_that_join_midway_match_a_full_forward(
    model: PreTrainedModel, start_engine: EngineFactory
) -> None:
    engine = await start_engine(max_num_batched_tokens=24)  # long prompts take several steps
    asked = prompts(30)

    async def one(index: int) -> np.ndarray:
        await asyncio.sleep(0.002 * (index % 5))
        request = ask(asked[index], max_tokens=1 + 7 * index % 50, temperature=0.8, raw_logprobs=True)
        made = await complete(engine, request)
        assert len(made.token_ids) == 1 + 7 * index % 50
        assert made.finish_reason is FinishReason.LENGTH
        assert made.raw_logprobs is not None
        tokens = made.token_ids.tolist()
        raw = full_forward(model, asked[index], tokens)
        np.testing.assert_allclose(made.raw_logprobs, raw, atol=TOLERANCE)
        return np.abs(made.logprobs - full_forward(model, asked[index], tokens, 0.8))

    differences = np.concatenate(await asyncio.gather(*(one(index) for index in range(len(asked)))))
    assert differences.max() < TOLERANCE
    assert engine.stats().finished_requests == len(asked)


async def test_a_sequence_that_fills_the_context_matches_a_full_forward(
    model: PreTrainedModel, start_engine: EngineFactory
) -> None:
    engine = await start_engine(max_model_len=400)
    prompt = prompts(1, longest=1)[0] * 150
    made = await complete(engine, ask(prompt, max_tokens=10_000))
    assert len(prompt) + len(made.token_ids) == 400
    assert np.abs(made.logprobs - full_forward(model, prompt, made.token_ids.tolist())).max() < TOLERANCE


async def test_bfloat16_stays_close_to_a_full_forward(start_engine: EngineFactory) -> None:
    low = make_model(initializer_range=0.1).to(torch.bfloat16)
    engine = await start_engine(low)
    asked = prompts(8)
    made = await asyncio.gather(*(complete(engine, ask(prompt, max_tokens=30)) for prompt in asked))
    differences = [
        np.abs(each.logprobs - full_forward(low, prompt, each.token_ids.tolist()))
        for prompt, each in zip(asked, made, strict=True)
    ]
    assert np.concatenate(differences).mean() < 0.02


async def test_a_group_with_one_prompt_shares_its_prefill_and_still_matches(
    model: PreTrainedModel, start_engine: EngineFactory
) -> None:
    engine = await start_engine()
    prompt = prompts(1, longest=1)[0] * 30
    asked = [prompt] * 6 + [[*prompt[:20], 1, 2, 3]]
    made = await asyncio.gather(*(complete(engine, ask(each, max_tokens=12)) for each in asked))
    for each, chunk in zip(asked, made, strict=True):
        assert np.abs(chunk.logprobs - full_forward(model, each, chunk.token_ids.tolist())).max() < TOLERANCE
    stats = engine.stats()
    assert stats.shared_prompt_tokens == 5 * 29 + 20
    assert stats.prefilled_tokens == 29 + 2
    assert MIN_SHARED_TOKENS < 20


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(start_engine: EngineFactory) -> None:
    engine = await start_engine()
    asked = prompts(8, seed=5)
    alone = [await complete(engine, ask(prompt, seed=seed, top_p=0.9)) for seed, prompt in enumerate(asked)]
    crowd = await asyncio.gather(
        *(complete(engine, ask(prompt, seed=seed, top_p=0.9)) for seed, prompt in enumerate(asked))
    )
    assert [each.token_ids.tolist() for each in alone] == [each.token_ids.tolist() for each in crowd]
    other = await complete(engine, ask(asked[0], seed=99, max_tokens=32))
    assert other.token_ids[:8].tolist() != alone[0].token_ids.tolist()


async def test_more_requests_than_slots_wait_and_a_full_queue_refuses(start_engine: EngineFactory) -> None:
    engine = await start_engine(num_slots=2, max_queue=3)
    running = [asyncio.create_task(complete(engine, ask([1], max_tokens=40))) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(MeshError) as refused:
        await complete(engine, ask([1]))
    assert refused.value.reason is Reason.OVERLOADED
    assert refused.value.retry_after_s is not None
    assert [len(made.token_ids) for made in await asyncio.gather(*running)] == [40] * 5
    assert len((await complete(engine, ask([1]))).token_ids) == 8


async def test_a_bound_on_the_cache_lowers_the_slots(start_engine: EngineFactory) -> None:
    slot_bytes = 2 * 2 * 2 * 8 * 4 * 96  # layers, keys and values, heads, head width, float32, tokens
    engine = await start_engine(num_slots=8, kv_cache_bytes=3 * slot_bytes)
    assert engine.num_slots == 3
    with pytest.raises(ValueError, match="raise kv_cache_bytes or lower max_model_len"):
        await start_engine(kv_cache_bytes=slot_bytes - 1)


async def test_closing_the_stream_frees_the_slot(start_engine: EngineFactory) -> None:
    engine = await start_engine(num_slots=1, max_model_len=500)
    stream = engine.generate(ask([1], max_tokens=490, stream=True))
    await anext(stream)
    waiting = asyncio.create_task(complete(engine, ask([2], max_tokens=480)))
    await until_in_flight(engine, 2)
    await stream.aclose()
    waiting.cancel()  # cancelled in the queue or just seated
    made = await asyncio.wait_for(complete(engine, ask([3], max_tokens=3)), 30.0)
    assert len(made.token_ids) == 3
    await until(lambda: engine.in_flight == engine.stats().running == 0)


async def test_non_finite_logits_fail_the_request_and_the_slots_recover(
    model: PreTrainedModel, start_engine: EngineFactory
) -> None:
    engine = await start_engine()
    broken = {name: torch.full(shape, torch.nan) for name, _, shape in engine.layout()}
    good = {name: tensor.clone() for name, tensor in model.named_parameters()}
    await engine.stage(HostVersion(version=1, tensors=broken))
    await engine.pause()
    await engine.apply(1, b"nan")
    await engine.resume()
    with pytest.raises(MeshError, match="not finite") as failed:
        await complete(engine, ask([1, 2, 3]))
    assert failed.value.reason is Reason.ENGINE_FAILED
    await engine.stage(HostVersion(version=2, tensors=good))
    await engine.pause()
    await engine.apply(2, b"good")
    await engine.resume()
    made = await complete(engine, ask([1, 2, 3], max_tokens=20))
    assert np.abs(made.logprobs - full_forward(model, [1, 2, 3], made.token_ids.tolist())).max() < TOLERANCE


async def test_the_drain_deadline_aborts_what_is_left(start_engine: EngineFactory) -> None:
    engine = await start_engine(max_model_len=500)
    await engine.pause()
    running = asyncio.create_task(complete(engine, ask([1], max_tokens=490)))
    await until_in_flight(engine, 1)
    await engine.close(0.0)
    assert (await running).finish_reason is FinishReason.ABORT


async def test_no_more_stop_tokens_are_held_back_than_every_engine_takes(start_engine: EngineFactory) -> None:
    engine = await start_engine()
    engine.vocab_size = 1000

    def asked(count: int, min_tokens: int) -> GenerateRequest:
        return ask([1], stop_token_ids=tuple(range(count)), min_tokens=min_tokens)

    for count, min_tokens in ((120, 1), (1000, 0)):
        engine.check_request(asked(count, min_tokens))
    with pytest.raises(MeshError, match=r"121 different stop_token_ids with min_tokens.*name fewer"):
        engine.check_request(asked(121, 1))


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path)
    return tmp_path


def built(folder: Path, **changes: Any) -> EmbeddedEngine:
    config = InferenceConfig(model=ModelConfig(name=str(folder), device="cpu", dtype="float32"), **changes)
    return build_engine(config)


def test_a_length_that_was_not_set_is_at_most_the_model_s_positions_also_from_a_written_configuration(
    folder: Path, tmp_path: Path
) -> None:
    dump_toml(InferenceConfig(model=ModelConfig(name=str(folder), device="cpu")), tmp_path / "inference.toml")
    written = load_config(InferenceConfig, ["@", str(tmp_path / "inference.toml")], prog="inference", environ={})
    assert build_engine(written).max_model_len == 512
    with pytest.raises(ValueError, match="max_model_len 513 is beyond the 512 positions of"):
        built(folder, max_model_len=513)


def test_the_cache_leaves_room_for_a_version_within_what_a_container_allows(
    folder: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sum(parameter.nbytes for parameter in model.parameters())
    slot = 2 * 2 * 512 * 2 * 8 * 4  # keys and values of two layers, 512 positions of two heads of eight floats
    memory = MachineMemory(total=2**40, available=weights + 8 * slot, limited=True)
    monkeypatch.setattr(build, "machine_memory", lambda: memory)
    alone = built(folder, max_model_len=512)
    followed = built(folder, max_model_len=512, weight_broadcast=WeightBroadcastConfig())
    assert followed.num_slots == 4  # half of what weights and their second copy leave
    assert alone.num_slots == (weights + 8 * slot) // 2 // slot
    small = MachineMemory(total=2**40, available=weights, limited=True)
    monkeypatch.setattr(build, "machine_memory", lambda: small)
    with pytest.raises(ValueError, match="versions come into a second copy of its weights"):
        built(folder, max_model_len=512, weight_broadcast=WeightBroadcastConfig())
