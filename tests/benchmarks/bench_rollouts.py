"""Requests and tokens a second between an engine and `Rollout` messages, path by path.

    python tests/benchmarks/bench_rollouts.py                         # the embedded engine on this CPU
    python tests/benchmarks/bench_rollouts.py --instant               # an engine that costs nothing: the paths' CPU
    python tests/benchmarks/bench_rollouts.py --instant --paths rollouts reverse tools --concurrency 64 512 2000
    python tests/benchmarks/bench_rollouts.py --instant --paths rollouts --beside ../before  # in turns
    python tests/benchmarks/bench_rollouts.py --clients 8 --config inference.toml  # the engine of `inference`
    python tests/benchmarks/bench_rollouts.py --clients 8 --url http://host:8000 --paths completions json

Paths: `engine` calls generate() in the server's own process; `completions` is /v1/completions without logprobs, `json`
and `binary` are /inference/v1/generate with logprobs, all with the same HTTP client; `rollouts` plays single-turn
episodes of random letters through the rollout service, up to the bytes of its messages, `reverse` those of
reverse_text, and `tools` episodes of four turns with a tool call each, counted in turns (needs --instant); `envserver`
plays what `rollouts` does with verifiers' own EnvServer. Every client plays before it is measured, as many at once as
then. With --url the server is somebody else's (bare `vllm serve` has no path binary), and `engine` cannot be measured.
Client CPU is that of the client processes for each request; server CPU that of this process, the model included where
it runs here. Loop lag is how late a timer of the client's event loop is. API key: MESHRL_API_KEY.
"""

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from meshrl.inference.engine import Engine, EngineStats, FinishReason, GenerateRequest, SamplingParams, TokenChunk
from meshrl.wire.types import VersionSpan
from rollout_load import PLAYED, TOOL_TURNS, Load, LoadProcess, Target, measure
from rollout_paths import TOOL_CALL, save_tokenizer

PATHS = ("engine", "completions", "json", "binary", *PLAYED)
USUAL_PATHS = PATHS[:5]
TINY_VOCAB = 300


class InstantEngine:
    """Answers at once with tokens drawn at the start; with a call of the tool where the prompt has a tool."""

    version, root, paused, draining, unfit, in_flight = 0, None, False, False, None, 0
    logprobs_mode = "processed_logprobs"
    adapters, runs = None, {}

    def __init__(self, max_model_len: int, vocab_size: int, tokenizer: Any) -> None:
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self._tools_mark = tokenizer.convert_tokens_to_ids("<tools>")
        self._call = np.array(tokenizer.encode(TOOL_CALL, add_special_tokens=False), np.int32)
        draw = np.random.default_rng(0)
        self._ids = draw.integers(5, vocab_size, max_model_len).astype(np.int32)
        self._logprobs = draw.uniform(-5.0, 0.0, max_model_len).astype(np.float32)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        await asyncio.sleep(0)
        ids = self._call if request.prompt_ids[0] == self._tools_mark else self._ids[: request.sampling.max_tokens]
        count = len(ids)
        yield TokenChunk(
            start=0,
            token_ids=ids,
            logprobs=self._logprobs[:count],
            version_spans=(VersionSpan(start=0, end=count, version=0),),
            finish_reason=FinishReason.STOP if ids is self._call else FinishReason.LENGTH,
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            running=0, waiting=0, slots=4096, generated_tokens=0, prefilled_tokens=0, shared_prompt_tokens=0,
            finished_requests=0, steps=0, busy_s=0.0,
        )  # fmt: skip

    async def close(self, deadline_s: float = 0.0) -> None:
        """Nothing to close."""


async def open_engine_of(options: argparse.Namespace, tokenizer: Path) -> tuple[Engine, str, Any]:
    """The engine to serve from here, the name of its model and its tokenizer."""
    from transformers import AutoTokenizer

    if options.config is not None:
        from meshrl.core.config import load_config
        from meshrl.inference.build import open_engine
        from meshrl.inference.config import InferenceConfig

        config = load_config(InferenceConfig, ["@", str(options.config)], prog="inference")
        return await open_engine(config), config.model.name, AutoTokenizer.from_pretrained(tokenizer)
    length = 2 * options.prompt_tokens + options.new_tokens
    if options.instant:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
        return InstantEngine(max(length, 4096), options.vocab_size, loaded), "instant", loaded
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from meshrl.inference.embedded.engine import EmbeddedEngine

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=options.vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=length,
            tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
        )
    )  # fmt: skip
    engine = EmbeddedEngine(model.eval(), max_model_len=length, num_slots=max(options.concurrency), seed=0, version=0)
    engine.start()
    return engine, "tiny", AutoTokenizer.from_pretrained(tokenizer)


async def serve(engine: Engine, name: str, tokenizer: Any, stack: AsyncExitStack) -> str:
    """Serves the engine from this loop as `inference` does; returns its URL."""
    from meshrl.inference.http.app import InferenceServer
    from meshrl.inference.http.tokenizer import TextCodec

    codec = TextCodec(tokenizer)
    app = InferenceServer(engine, model_name=name, codec=codec).app()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def model_of(url: str) -> str:
    """The first model that a server names."""
    key = os.environ.get("MESHRL_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{url}/v1/models") as reply:
        reply.raise_for_status()
        return str((await reply.json())["data"][0]["id"])


async def direct(engine: Engine, target: Target, concurrency: int, requests: int) -> Load:
    """Calls of generate(), made in this process."""
    draw = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=target.new_tokens, ignore_eos=True)

    async def one() -> int:
        prompt_ids = tuple(draw.integers(5, target.vocab_size, target.prompt_tokens).tolist())
        request = GenerateRequest(request_id="bench", prompt_ids=prompt_ids, sampling=sampling)
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    return await measure(one, concurrency, requests)


async def spread(clients: list[LoadProcess], path: str, concurrency: int, requests: int) -> list[Load]:
    """Shares a load between the client processes, at least one request under way in each that takes part.

    Each of them has played as many at once before, so that what loads at the first is in nobody's row.
    """
    used = clients[: max(1, min(len(clients), concurrency))]
    share = [concurrency // len(used) + (number < concurrency % len(used)) for number in range(len(used))]
    each = max(1, requests // len(used))
    parts = list(zip(used, share, strict=True))
    await asyncio.gather(*(client.run(path, part, part, profile=False) for client, part in parts))
    return await asyncio.gather(*(client.run(path, part, each) for client, part in parts))


async def bench(options: argparse.Namespace, stack: AsyncExitStack) -> None:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    tokenizer = options.tokenizer or folder
    if options.tokenizer is None:
        save_tokenizer(folder, options.vocab_size)
    engine: Engine | None = None
    if options.url:
        url = options.url.rstrip("/").removesuffix("/v1")
        name = await model_of(url)
    else:
        engine, name, loaded = await open_engine_of(options, tokenizer)
        stack.push_async_callback(engine.close)
        url = await serve(engine, name, loaded, stack)
    target = Target(
        url=url,
        model=name,
        api_key=os.environ.get("MESHRL_API_KEY"),
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        vocab_size=options.vocab_size,
        tokenizer=str(tokenizer),
        group_size=options.group_size,
        profile=None if options.profile is None else str(options.profile),
    )
    clients = {"": [LoadProcess(target, number) for number in range(options.clients)]}
    if options.beside:
        other = replace(target, source=str(options.beside.resolve()), profile=None)
        clients = {"here": clients[""], "beside": [LoadProcess(other, number) for number in range(options.clients)]}
    stack.callback(lambda: [client.close() for processes in clients.values() for client in processes])
    paths = [path for path in options.paths if path != "engine" or engine is not None]
    tokens = f"{target.prompt_tokens} tokens in, {target.new_tokens} out"
    print(f"{name} at {url}: {tokens}, {options.clients} client process(es)")
    print("| path | concurrency | requests/s | tokens/s | client CPU ms | server CPU ms | loop lag ms, p50 | p99 |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for path in paths:
        for concurrency in options.concurrency:
            for _ in range(options.turns):
                for name, processes in clients.items():
                    line = await row(path, concurrency, options, engine, target, processes)
                    rows.append(line | {"source": name})
                    print(shown(line, name), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        machine = {
            "machine": platform.node(),
            "cpus": os.cpu_count(),
            "arguments": {k: str(v) for k, v in vars(options).items()},
        }
        options.json.write_text(json.dumps({**machine, "model": name, "rows": rows}, indent=1))


async def row(
    path: str, concurrency: int, options: argparse.Namespace, engine: Engine | None, target: Target,
    clients: list[LoadProcess],
) -> dict[str, Any]:  # fmt: skip
    """Measures one line of the table."""
    requests, in_flight, group, turns = concurrency * options.rounds, concurrency, 1, 1
    if path in PLAYED and path != "envserver":
        group, turns = options.group_size, TOOL_TURNS if path == "tools" else 1
        requests, in_flight = max(1, requests // group), max(1, concurrency // group)
    if path == "engine":
        assert engine is not None  # `bench` leaves the path out otherwise
        await direct(engine, target, min(in_flight, 4), 4)
        server_cpu_s = time.process_time()
        loads = [await direct(engine, target, in_flight, requests)]
        server_cpu_s, warm_up = time.process_time() - server_cpu_s, 0
    else:
        server_cpu_s = time.process_time()
        loads = await spread(clients, path, in_flight, requests)
        server_cpu_s, warm_up = time.process_time() - server_cpu_s, in_flight
    made = turns * group * sum(load.requests for load in loads)
    took_s = max(load.ended_s for load in loads) - min(load.started_s for load in loads)
    lags_ms = 1e3 * np.concatenate([load.lags_s for load in loads])
    return {
        "path": path,
        "concurrency": concurrency,
        "requests_per_s": made / took_s,
        "tokens_per_s": sum(load.tokens for load in loads) / took_s,
        "client_cpu_ms": None if path == "engine" else 1e3 * sum(load.cpu_s for load in loads) / made,
        "server_cpu_ms": None if engine is None else 1e3 * server_cpu_s / (made + turns * group * warm_up),
        "lag_p50_ms": float(np.percentile(lags_ms, 50)) if len(lags_ms) else None,
        "lag_p99_ms": float(np.percentile(lags_ms, 99)) if len(lags_ms) else None,
    }


def shown(line: dict[str, Any], source: str) -> str:
    keys = ("client_cpu_ms", "server_cpu_ms", "lag_p50_ms", "lag_p99_ms")
    costs = ["" if line[key] is None else f"{line[key]:.2f}" for key in keys]
    speeds = f"{line['requests_per_s']:,.1f} | {line['tokens_per_s']:,.0f}"
    return f"| {line['path']} {source} | {line['concurrency']} | {speeds} | {' | '.join(costs)} |"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", help="measure a server that runs already")
    source.add_argument("--config", type=Path, help="TOML file of `inference`: its engine is opened and served here")
    source.add_argument("--instant", action="store_true", help="serve an engine that answers at once")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(USUAL_PATHS))
    parser.add_argument("--concurrency", type=int, nargs="+", help="requests under way, over all clients")
    parser.add_argument("--rounds", type=int, default=4, help="requests of a measurement, as multiples of concurrency")
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, help="tokens of each completion; 256, or 64 for the embedded engine")
    parser.add_argument("--vocab-size", type=int, help="tokens that prompts are drawn from; 32000, or 300")
    parser.add_argument("--tokenizer", type=Path, help="for the path rollouts; None makes one of single characters")
    parser.add_argument("--group-size", type=int, default=1, help="rollouts of one prompt, path rollouts only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside", type=Path, help="another checkout: its rollout service takes turns with this one's")
    parser.add_argument("--turns", type=int, default=1, help="measurements of each row, taking turns")
    parser.add_argument("--profile", type=Path, help="folder for profiles (cProfile) of the first client, by path")
    options = parser.parse_args()
    if "tools" in options.paths and not options.instant:
        parser.error("path tools needs --instant: only that engine calls the tool")
    large = options.url or options.config
    options.concurrency = options.concurrency or ([64, 256, 512] if large else [64] if options.instant else [16])
    options.new_tokens = options.new_tokens or (256 if large or options.instant else 64)
    options.vocab_size = options.vocab_size or (32000 if large else TINY_VOCAB)
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
    return options


async def main() -> None:
    async with AsyncExitStack() as stack:
        await bench(parse(), stack)


if __name__ == "__main__":
    asyncio.run(main())
