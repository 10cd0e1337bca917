"""Tokens a second of the embedded engine beside transformers' `generate` and `generate_batch`, on one machine.

    python tests/benchmarks/bench_engine.py [--threads 1] [--json outputs/bench/engine.json]

The model is a random Qwen3 of 1.6M parameters with 300 tokens; prompts have 48 tokens, different for each request.
Equal: each request makes 64 tokens. Ragged: lengths drawn from 8 to 128; `generate` must run its static batch to the
longest, and only the tokens asked for count. Medians over rounds; the engines take turns, so that other load on the
machine hits all of them.
"""

import argparse
import asyncio
import copy
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.engine import GenerateRequest, SamplingParams

PROMPT_TOKENS = 48
EQUAL_TOKENS = 64
RAGGED_TOKENS = (8, 128)
VOCAB = 300


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=3, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def make_work(requests: int, *, ragged: bool, seed: int, shared: bool) -> tuple[list[list[int]], list[int]]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(5, VOCAB, (requests, PROMPT_TOKENS))
    if shared:  # groups of 16 rollouts of one prompt, as in training
        prompts = prompts[np.arange(requests) // 16]
    lengths = rng.integers(RAGGED_TOKENS[0], RAGGED_TOKENS[1] + 1, requests) if ragged else [EQUAL_TOKENS] * requests
    return prompts.tolist(), [int(length) for length in lengths]


Run = Callable[[list[list[int]], list[int]], float]


def embedded_runner(engine: EmbeddedEngine, loop: asyncio.AbstractEventLoop) -> Run:
    async def one(prompt: list[int], length: int) -> int:
        params = SamplingParams(max_tokens=length)
        request = GenerateRequest(request_id="bench", prompt_ids=tuple(prompt), sampling=params)
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    async def every(prompts: list[list[int]], lengths: list[int]) -> int:
        return sum(await asyncio.gather(*(one(*each) for each in zip(prompts, lengths, strict=True))))

    def run(prompts: list[list[int]], lengths: list[int]) -> float:
        started = time.perf_counter()
        made = loop.run_until_complete(every(prompts, lengths))
        assert made == sum(lengths)
        return time.perf_counter() - started

    return run


def generate_runner(model: PreTrainedModel) -> Run:
    def run(prompts: list[list[int]], lengths: list[int]) -> float:
        longest = max(lengths)
        started = time.perf_counter()
        model.generate(
            torch.tensor(prompts), max_new_tokens=longest, min_new_tokens=longest, do_sample=True, top_k=0,
            pad_token_id=0, attention_mask=torch.ones(len(prompts), PROMPT_TOKENS, dtype=torch.long),
        )  # fmt: skip
        return time.perf_counter() - started

    return run


def generate_batch_runner(model: PreTrainedModel, stack: ExitStack, most_requests: int) -> Run:
    """transformers' continuous batching, its manager kept running; requests carry their own lengths. Its cache has the
    blocks that so many requests at once need, where transformers would take 90% of the free memory."""
    config = GenerationConfig(
        max_new_tokens=max(EQUAL_TOKENS, *RAGGED_TOKENS), do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    cache = ContinuousBatchingConfig(max_batch_tokens=most_requests * PROMPT_TOKENS)
    longest = PROMPT_TOKENS + max(EQUAL_TOKENS, *RAGGED_TOKENS)
    cache.num_blocks = most_requests * -(-longest // cache.page_size)
    manager = stack.enter_context(
        model.continuous_batching_context_manager(generation_config=config, continuous_batching_config=cache)
    )

    def run(prompts: list[list[int]], lengths: list[int]) -> float:
        started = time.perf_counter()
        for prompt, length in zip(prompts, lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length)
        finished = 0
        while finished < len(prompts):
            output = manager.get_result(timeout=60)
            finished += output is not None and output.is_finished()
        return time.perf_counter() - started

    return run


def measure(runners: dict[str, Run], requests: int, rounds: int, *, ragged: bool, shared: bool) -> dict[str, float]:
    """Median tokens a second of each runner."""
    speeds: dict[str, list[float]] = {name: [] for name in runners}
    for index in range(rounds + 1):
        work = make_work(requests, ragged=ragged, seed=index, shared=shared)
        for name, run in runners.items():
            seconds = run(*work)
            if index:  # the first round warms up
                speeds[name].append(sum(work[1]) / seconds)
    return {name: statistics.median(values) for name, values in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--skip-generate-batch", action="store_true")
    parser.add_argument("--json", type=Path)
    with ExitStack() as stack:
        bench(parser.parse_args(), stack)


def bench(arguments: argparse.Namespace, stack: ExitStack) -> None:
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loop = asyncio.new_event_loop()
    model = make_model()
    engine = EmbeddedEngine(copy.deepcopy(model), max_model_len=256, num_slots=128, seed=0)

    async def start() -> None:
        engine.start()

    loop.run_until_complete(start())
    runners = {"embedded": embedded_runner(engine, loop), "generate": generate_runner(model)}
    if not arguments.skip_generate_batch:
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        runners["generate_batch"] = generate_batch_runner(copy.deepcopy(model), stack, max(arguments.requests))
    rows = []
    print(
        f"{'requests':>8} {'lengths':>8} {'prompts':>8}" + "".join(f"{name:>16}" for name in runners) + "  (tokens/s)"
    )
    for requests in arguments.requests:
        for ragged, shared in ((False, False), (True, False), (True, True)):
            if shared and requests < 16:
                continue
            speeds = measure(runners, requests, arguments.rounds, ragged=ragged, shared=shared)
            lengths, prompts = "8-128" if ragged else "equal", "group16" if shared else "unique"
            print(
                f"{requests:>8} {lengths:>8} {prompts:>8}" + "".join(f"{speeds[name]:>16,.0f}" for name in runners),
                flush=True,
            )
            rows.append({"requests": requests, "lengths": lengths, "prompts": prompts, "tokens_per_s": speeds})
    loop.run_until_complete(engine.close())
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        machine = {"threads": arguments.threads, "cpus": os.cpu_count(), "processor": platform.processor()}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        report = {"parameters": model.num_parameters(), "machine": machine, "versions": versions, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
