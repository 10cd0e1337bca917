"""Runs vLLM's scheduler and ours beside each other on the same requests; a program, for an interpreter that has vLLM.

    PYTHONPATH=services:clients/python .tools/vllm/bin/python tests/support/scheduler_pair.py MODEL [REQUESTS]

Prints as JSON where the two first decided otherwise ("" if nowhere), how many requests were preempted, and the CPU
milliseconds of a step that decodes all requests, of each.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from meshrl.inference.vllm import whole_completions
from meshrl.inference.vllm.arguments import engine_arguments, engine_config

BLOCK, STOP = 16, 2


class Driven:
    """One scheduler, with a model that answers each request with tokens drawn from the request's own seed."""

    def __init__(self, model: str, *, ours: bool, slots: int, blocks: int) -> None:
        given = {"model": model, "max_model_len": 512, "max_num_seqs": slots, "dtype": "float32"}
        arguments = engine_arguments(
            {**given, "max_num_batched_tokens": 2048, "async_scheduling": True}, torch_threads=1
        )
        config = engine_config(arguments)
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        kept = whole_completions.answer_without_blocks
        whole_completions.end_with_parent = lambda: None
        whole_completions.answer_without_blocks = kept if ours else lambda manager: None
        made = whole_completions.OverlappedScheduler
        hashed = "hash_block_size" in inspect.signature(made.__mro__[2].__init__).parameters
        self.scheduler: Any = made(
            vllm_config=config, kv_cache_config=cache, block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(config), **({"hash_block_size": BLOCK} if hashed else {}),
        )  # fmt: skip
        whole_completions.answer_without_blocks = kept
        self._hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
        self._draws: dict[str, random.Random] = {}
        self.cpu_s: list[float] = []

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(
            max_tokens=max_tokens, stop_token_ids=[STOP], ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY, extra_args={whole_completions.WHOLE_KEY: True},
        )  # fmt: skip
        self._draws[name] = random.Random(name)
        self.scheduler.add_request(
            Request(
                request_id=name, prompt_token_ids=prompt, sampling_params=params, pooling_params=None,
                block_hasher=self._hasher,
            )
        )  # fmt: skip

    def step(self) -> dict[str, Any]:
        """Schedules a step and takes its tokens; what was decided."""
        began_s = time.thread_time()
        output = self.scheduler.schedule()
        spent_s = time.thread_time() - began_s
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        full = [one.num_computed_tokens >= one.num_tokens for one in requests]
        tokens = [[self._draws[name].randrange(STOP, 90)] if at else [] for name, at in zip(names, full, strict=True)]
        ran = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: place for place, name in enumerate(names)}, sampled_token_ids=tokens,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip
        began_s = time.thread_time()
        answered = self.scheduler.update_from_output(output, ran)
        self.cpu_s.append(spent_s + time.thread_time() - began_s)
        cached, pool = output.scheduled_cached_reqs, self.scheduler.kv_cache_manager.block_pool
        return {
            "scheduled": output.num_scheduled_tokens,
            "new": [(one.req_id, one.block_ids, one.num_computed_tokens) for one in output.scheduled_new_reqs],
            "blocks": list(zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)),
            "preempted": sorted(output.preempted_req_ids or ()),
            "free": pool.get_num_free_blocks(),
            "hashes": len(pool.cached_block_hash_to_block),
            "answers": [(one.request_id, one.new_token_ids) for batch in answered.values() for one in batch.outputs],
        }


def first_difference(pair: tuple[Driven, Driven]) -> tuple[str, int]:
    """Requests come, share prompts, stop and are preempted for want of blocks; where both differ, and preemptions."""
    draw, preempted = random.Random(0), 0
    shared = [[draw.randrange(3, 90) for _ in range(draw.randrange(5, 200))] for _ in range(8)]
    for number in range(600):
        for index in range(draw.randrange(3) if number < 400 else 0):
            prompt = [*draw.choice(shared), *(draw.randrange(3, 90) for _ in range(draw.randrange(1, 30)))]
            most = draw.randrange(1, 120)
            for driven in pair:
                driven.add(f"{number}-{index}", prompt, most)
        found, wanted = (driven.step() for driven in pair)
        preempted += len(wanted["preempted"])
        for what, value in wanted.items():
            if found[what] != value:
                return f"step {number}, {what}: {found[what]} instead of {value}", preempted
    return "", preempted


def compare(model: str) -> dict[str, Any]:
    init_none_hash(get_hash_fn_by_name("sha256"))
    pair: Any = tuple(Driven(model, ours=ours, slots=48, blocks=130) for ours in (True, False))
    difference, preempted = first_difference(pair)
    return {"difference": difference, "preempted": preempted}


def decoding_ms(driven: Driven, requests: int) -> float:
    """CPU milliseconds of a step that decodes so many requests."""
    for number in range(requests):
        driven.add(f"r{number}", list(range(3, 67)), 400)
    for _ in range(requests * 64 // 2048 + 4):
        driven.step()
    driven.cpu_s.clear()
    for _ in range(2 * BLOCK):
        driven.step()
    return 1000 * statistics.median(driven.cpu_s)


if __name__ == "__main__":
    model, requests = sys.argv[1], int((*sys.argv[2:], "128")[0])
    found = compare(model)
    for name, ours in (("ours_ms", True), ("vllm_ms", False)):
        found[name] = decoding_ms(Driven(model, ours=ours, slots=requests, blocks=40 * requests), requests)
    print(json.dumps(found))
