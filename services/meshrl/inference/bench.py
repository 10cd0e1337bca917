"""`inference --bench`: measures how fast the configured engine samples by itself, without server, hub or agent.

Requests are random prompts in groups of `group_size`, with completions of a drawn length. `rl --bench` reads the rate
in bench/inference.json.

tokens/s: sampled tokens of the measured requests, over the time from the first one's start to the last one's end.
tail: share of that time in which less than half of the requests are in flight, for there are no more.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from loguru import logger
from transformers import AutoConfig

from meshrl.core.config.shared import ModelConfig
from meshrl.core.waiting import StoppedError, unless_stopped
from meshrl.inference.build import open_engine
from meshrl.inference.config import EngineBenchConfig, InferenceConfig
from meshrl.inference.engine import Engine, GenerateRequest, SamplingParams
from meshrl.models.load import ModelError
from meshrl.wire.errors import MeshError
from meshrl.wire.text_table import plain_table

LOWEST_ID = 5  # ids below are special tokens in many vocabularies; random prompts do without


@dataclass(frozen=True, kw_only=True)
class EngineBenchReport:
    model: str
    requests: int
    concurrency: int
    prompt_tokens: int  # of all measured requests
    sampled_tokens: int
    seconds: float
    tokens_per_s: float  # sampled
    requests_per_s: float
    tail: float
    latency_median_s: float
    latency_p99_s: float

    def table(self) -> str:
        rows = (
            ("sampled", f"{self.tokens_per_s:,.0f}", f"tokens/s, {self.requests_per_s:,.1f} requests/s"),
            ("tokens", f"{self.prompt_tokens:,d}", f"of prompts, {self.sampled_tokens:,d} sampled"),
            ("latency", f"{self.latency_median_s:.2f}", f"s median, {self.latency_p99_s:.2f} s p99"),
            ("tail", f"{self.tail:.1%}", "of the time with less than half in flight"),
        )
        title = f"{self.model}: {self.requests} requests, {self.concurrency} in flight"
        return f"{title}\n{plain_table(rows, right={1}, indent='  ')}"


async def bench(config: InferenceConfig, settings: EngineBenchConfig, stop: asyncio.Event) -> int:
    try:
        engine = await unless_stopped(stop, open_engine(config.model_copy(update={"weight_broadcast": None})))
    except StoppedError:
        return 0
    except (ModelError, ValueError) as error:
        logger.error("{}", error)
        return 2
    try:
        report = await unless_stopped(
            stop, measure(engine, settings, config.model, deadline_s=config.request_deadline_s)
        )
    except StoppedError:
        return 0
    except (MeshError, ValueError) as error:  # requests that this engine does not take, or that outlast their deadline
        logger.error("{}", error)
        return 2
    finally:
        await engine.close()
    path = settings.json_path or config.output_dir / "bench" / "inference.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = {**asdict(report), "settings": settings.model_dump(mode="json")}
    path.write_text(json.dumps(numbers, indent=2) + "\n")
    logger.info("{}\nnumbers in {}", report.table(), path)
    return 0


async def measure(
    engine: Engine, settings: EngineBenchConfig, model: ModelConfig, *, deadline_s: float
) -> EngineBenchReport:
    """Raises MeshError for requests that the engine refuses, and ValueError."""
    model_config = await asyncio.to_thread(
        AutoConfig.from_pretrained, model.name, trust_remote_code=model.trust_remote_code
    )
    requests = fake_requests(settings, engine, vocab_size=int(model_config.get_text_config().vocab_size))
    concurrency = settings.concurrency or min(engine.stats().slots, len(requests))
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    await _run([replace(one, sampling=short) for one in requests[:concurrency]], engine, concurrency, deadline_s)
    seconds, tail_s, latencies_s = await _run(requests, engine, concurrency, deadline_s)
    sampled = sum(one.sampling.max_tokens for one in requests)
    return EngineBenchReport(
        model=model.name,
        requests=len(requests),
        concurrency=concurrency,
        prompt_tokens=sum(len(one.prompt_ids) for one in requests),
        sampled_tokens=sampled,
        seconds=seconds,
        tokens_per_s=sampled / seconds,
        requests_per_s=len(requests) / seconds,
        tail=tail_s / seconds,
        latency_median_s=float(np.median(latencies_s)),
        latency_p99_s=float(np.quantile(latencies_s, 0.99)),
    )


def fake_requests(settings: EngineBenchConfig, engine: Engine, *, vocab_size: int) -> list[GenerateRequest]:
    """The same settings give the same. Raises ValueError if they are too long for the engine."""
    longest = settings.prompt_tokens + settings.max_tokens
    if longest > engine.max_model_len:
        raise ValueError(
            f"bench.prompt_tokens and bench.max_tokens are {longest} together, and max_model_len is"
            f" {engine.max_model_len}; lower them, or raise max_model_len"
        )
    source = np.random.default_rng(0)
    requests: list[GenerateRequest] = []
    prompt: tuple[int, ...] = ()
    for index in range(settings.requests):
        if index % settings.group_size == 0:
            ids = source.integers(min(LOWEST_ID, vocab_size - 1), vocab_size, settings.prompt_tokens)
            prompt = tuple(int(token) for token in ids)
        tokens = int(source.integers(min(settings.min_tokens, settings.max_tokens), settings.max_tokens + 1))
        sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        requests.append(GenerateRequest(request_id=f"bench-{index}", prompt_ids=prompt, sampling=sampling))
    return requests


async def _run(
    requests: Sequence[GenerateRequest], engine: Engine, concurrency: int, deadline_s: float
) -> tuple[float, float, list[float]]:
    """Returns seconds: of all requests, of the tail, and the latency of each."""
    waiting = deque(requests)
    latencies: list[float] = []
    half_empty_at: float | None = None

    async def work() -> None:
        nonlocal half_empty_at
        while waiting:
            request = waiting.popleft()
            started = time.perf_counter()
            try:
                async with asyncio.timeout(deadline_s):
                    async for _ in engine.generate(request):
                        pass
            except TimeoutError:
                raise ValueError(
                    f"a request of {request.sampling.max_tokens} tokens took longer than request_deadline_s"
                    f" ({deadline_s:g}); raise it, or lower bench.max_tokens or bench.concurrency"
                ) from None
            latencies.append(time.perf_counter() - started)
            if half_empty_at is None and len(requests) - len(latencies) < concurrency / 2:
                half_empty_at = time.perf_counter()

    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(work())
    except* (MeshError, ValueError) as group:
        raise group.exceptions[0] from None
    ended = time.perf_counter()
    return ended - began, ended - (half_empty_at or ended), latencies
