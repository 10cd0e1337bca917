"""How many rollouts may run at once, by what engines say they hold."""

import numpy as np
import pytest

from meshrl.rollout.engines.capacity import (
    NOTHING_SAID,
    EngineCapacity,
    EpisodeSizes,
    RolloutLimit,
    capacity_in_metrics,
    capacity_of,
)
from meshrl.rollout.engines.engine_table import EngineTable, KnownEngine
from meshrl.wire import convert
from meshrl.wire.types import Rollout, Sample, VersionSpan


def played(prompt: int, completion: int, *, generation_s: float = 1.0, total_s: float = 1.0) -> tuple[Rollout, ...]:
    mask = np.arange(prompt + completion) >= prompt
    sample = Sample(
        token_ids=np.ones(len(mask), np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        version_spans=(VersionSpan(start=prompt, end=len(mask), version=0),),
    )
    timings_s = {"generation": generation_s, "total": total_s}
    return (
        Rollout(rollout_id="r", group_id="g", task_key="0", environment="e", samples=(sample,), reward=0.0,
                timings_s=timings_s),
    )  # fmt: skip


def engines_of(**capacities: EngineCapacity) -> EngineTable:
    engines = EngineTable(capacities)
    for url, capacity in capacities.items():
        engines.observe(url, 0, None, capacity)
    return engines


def up(engines: EngineTable) -> list[KnownEngine]:
    return [engine for engine in engines.listed if engine.healthy]


def limit_of(limit: RolloutLimit, engines: EngineTable) -> int:
    limit.follow(up(engines))
    return limit.rollouts


def test_the_limit_is_what_the_engines_that_are_up_hold_and_an_eighth_more():
    engines = engines_of(a=EngineCapacity(slots=128), b=EngineCapacity(slots=512))
    limit = RolloutLimit(None)
    assert limit_of(limit, engines) == 720
    engines.lose("b")
    assert limit_of(limit, engines) == 144
    why = "auto: engines hold 128 (a 128, its slots), and 16 more wait at them"
    assert limit.reason == f"{why}; 100% of a rollout's time is in model calls"
    engines.observe("b", 3, None, EngineCapacity(slots=64))
    assert limit_of(limit, engines) == 216


def test_without_any_engine_the_limit_stays_as_it_was_so_that_calls_find_out_who_is_away():
    engines, limit = engines_of(a=EngineCapacity(slots=32)), RolloutLimit(None)
    assert limit.rollouts == 256
    assert limit_of(limit, engines) == 36
    engines.lose("a")
    assert not limit.follow(up(engines))
    assert limit.rollouts == 36


def test_an_engine_that_says_nothing_counts_256():
    assert limit_of(RolloutLimit(None), engines_of(a=NOTHING_SAID)) == 256
    assert limit_of(RolloutLimit(None), engines_of(a=NOTHING_SAID, b=EngineCapacity(slots=8))) == 265


def test_room_in_the_kv_cache_bounds_long_rollouts_once_their_length_is_known():
    engines, limit = engines_of(a=EngineCapacity(slots=1024, kv_tokens=100_000)), RolloutLimit(None)
    assert limit_of(limit, engines) == 1152
    limit.take(EpisodeSizes.of(played(prompt=100, completion=800)))
    assert limit.held_tokens == 500.0
    assert limit_of(limit, engines) == 225  # 200 of them, and an eighth
    assert "a 200, by 100000 tokens of KV cache" in limit.reason
    for _ in range(1000):
        limit.take(EpisodeSizes.of(played(prompt=50, completion=100)))
    assert limit.held_tokens == pytest.approx(100.0, rel=0.01)
    assert limit_of(limit, engines) == pytest.approx(1125, rel=0.01)


def looks(limit: RolloutLimit, engine: KnownEngine, *, count: int, preempted: int, waiting: int, in_flight: int) -> int:
    """The limit after so many looks at an engine of 1,024 slots whose KV cache holds 200 of the rollouts."""
    for _ in range(count):
        engine.capacity = EngineCapacity(
            slots=1024, kv_tokens=100_000, preempted=preempted, waiting=waiting, in_flight=in_flight
        )
        limit.follow([engine])
    return limit.rollouts


def test_preemptions_lower_the_limit_and_a_full_engine_without_a_queue_raises_it():
    limit, engine = RolloutLimit(None), KnownEngine(url="a")
    limit.take(EpisodeSizes.of(played(prompt=100, completion=800)))
    assert looks(limit, engine, count=9, preempted=0, waiting=25, in_flight=225) == 225, "all as computed"
    assert looks(limit, engine, count=1, preempted=4, waiting=25, in_flight=225) == 203  # 180, and an eighth
    assert looks(limit, engine, count=9, preempted=4, waiting=20, in_flight=203) == 203, "no more of them: it stays"
    assert looks(limit, engine, count=60, preempted=99, waiting=0, in_flight=100) == 183, (
        "not full, so nothing is known"
    )
    rising = [looks(limit, engine, count=1, preempted=99, waiting=0, in_flight=1024) for _ in range(60)]
    assert rising == sorted(rising)
    assert rising[-1] == 1152, "all its slots: their prompts are shared"
    for more in range(100, 200):
        looks(limit, engine, count=1, preempted=more, waiting=9, in_flight=1024)
    assert limit.rollouts == 57, "a quarter at least"


def test_where_rollouts_wait_for_tools_more_of_them_run_but_at_most_four_times_as_many():
    engines, limit = engines_of(a=EngineCapacity(slots=160)), RolloutLimit(None)
    limit.take(EpisodeSizes.of(played(10, 10, generation_s=1.0, total_s=2.0)))
    assert limit_of(limit, engines) == 360
    for _ in range(1000):
        limit.take(EpisodeSizes.of(played(10, 10, generation_s=0.001, total_s=2.0)))
    assert limit_of(limit, engines) == 720


def test_what_a_rollout_took_is_the_same_in_its_message():
    rollouts = (*played(100, 800, generation_s=1.5, total_s=2.0), *played(30, 40))
    messages = [convert.rollout_event_to_proto(rollout).SerializeToString() for rollout in rollouts]
    assert EpisodeSizes.of_messages(messages) == EpisodeSizes.of(rollouts) == EpisodeSizes(840, 500.0, 2.0, 2.5)


def test_a_configured_limit_stays():
    limit = RolloutLimit(7)
    assert limit_of(limit, engines_of(a=EngineCapacity(slots=160))) == 7
    assert limit.reason == "as configured"


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"slots": 8, "kv_tokens": 4096}, EngineCapacity(slots=8, kv_tokens=4096)),
        ({"slots": 8, "kv_tokens": 0}, EngineCapacity(slots=8)),
        ({"slots": True, "kv_tokens": "many"}, NOTHING_SAID),
        ({"waiting": 0, "preempted": 3, "in_flight": -1}, EngineCapacity(waiting=0, preempted=3)),
        ({"slots": -1}, NOTHING_SAID),
        ({"version": "0.32.0"}, NOTHING_SAID),
        ([], NOTHING_SAID),
    ],
)
def test_only_positive_numbers_count_as_said(payload: object, expected: EngineCapacity):
    assert capacity_of(payload) == expected


def test_a_vllm_that_is_not_ours_says_its_kv_cache_in_its_metrics():
    text = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="27000"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_cpu_blocks="None",num_gpu_blocks="1000"} 1.0
vllm:num_requests_running{engine="0"} 3.0
"""
    assert capacity_in_metrics(text) == EngineCapacity(kv_tokens=448_000)
    assert EngineCapacity(kv_tokens=448_000).sequences(4480.0) == 100
    assert EngineCapacity(kv_tokens=448_000).sequences(100.0) == 256
    assert capacity_in_metrics('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1') == NOTHING_SAID
    assert capacity_in_metrics("") == NOTHING_SAID
