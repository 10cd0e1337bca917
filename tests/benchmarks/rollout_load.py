"""Client processes of bench_rollouts: each keeps its share of the requests in flight and says what came back.

`LoadProcess` is the parent's end of one. Standard library, aiohttp and numpy only, but for the path `rollouts`, which
plays episodes of `bench_words` through the rollout service's own servicer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from meshrl.wire.completion_frame import MEDIA_TYPE, decode

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
ROUTES = {"completions": COMPLETIONS, "json": GENERATE, "binary": GENERATE}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE_TOKENS = 20  # about what the template adds to a prompt, a character a token


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to call, and with what."""

    url: str
    model: str
    api_key: str | None
    prompt_tokens: int
    new_tokens: int
    vocab_size: int
    tokenizer: str
    group_size: int

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, kw_only=True)
class Load:
    """One process's share of a measurement; times of the wall clock, so that processes can be compared."""

    requests: int
    tokens: int
    started_s: float
    ended_s: float
    cpu_s: float


class LoadProcess:
    """A client process. `run` may be called again and again; the connections and the rollout service stay."""

    def __init__(self, target: Target, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, target, number), daemon=True)
        self._process.start()
        theirs.close()

    async def run(self, path: str, concurrency: int, requests: int) -> Load:
        self._pipe.send((path, concurrency, requests))
        answer = await asyncio.to_thread(self._pipe.recv)
        if isinstance(answer, str):
            raise SystemExit(f"the load of path {path} failed: {answer}")
        return answer

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(timeout=10)
        self._process.kill()


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of single characters, filled up to `vocab_size` with words that no prompt has."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<|im_start|>", "<|im_end|>", *map(chr, range(32, 127)), "\n"]
    names += [f"w{number} " for number in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _main(pipe: Connection, target: Target, number: int) -> None:
    with asyncio.Runner() as runner:
        runner.run(_serve(pipe, target, number))


async def _serve(pipe: Connection, target: Target, number: int) -> None:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                headers=target.headers,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=600.0),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        )
        draw, play = np.random.default_rng(number), None
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            path, concurrency, requests = order
            if path == "rollouts" and play is None:
                play = await _rollouts(target, stack, number)
            one = play if path == "rollouts" else _http(path, target, http, draw)
            try:
                pipe.send(await measure(one, concurrency, requests))
            except Exception as error:  # noqa: BLE001 - the parent ends the benchmark with it
                pipe.send(repr(error))


async def measure(one: Callable[[], Awaitable[int]], concurrency: int, requests: int) -> Load:
    """Keeps `concurrency` calls of `one` under way until `requests` are made; each says how many tokens it got."""
    left, tokens = requests, 0

    async def keep_going() -> None:
        nonlocal left, tokens
        while left > 0:
            left -= 1
            got = await one()
            tokens += got

    started_s, cpu_s = time.time(), time.process_time()
    await asyncio.gather(*(keep_going() for _ in range(concurrency)))
    return Load(
        requests=requests,
        tokens=tokens,
        started_s=started_s,
        ended_s=time.time(),
        cpu_s=time.process_time() - cpu_s,
    )


def _http(
    path: str, target: Target, http: aiohttp.ClientSession, draw: np.random.Generator
) -> Callable[[], Awaitable[int]]:
    """One request over HTTP, read as a client must read it: token ids and, but for completions, logprobs as arrays."""
    url, plain = target.url + ROUTES[path], path == "completions"
    headers = {"Content-Type": "application/json", **({"Accept": MEDIA_TYPE} if path == "binary" else {})}
    sampling = {"max_tokens": target.new_tokens, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}

    async def one() -> int:
        prompt = draw.integers(5, target.vocab_size, target.prompt_tokens).tolist()
        body: dict[str, Any] = {"model": target.model, "stream": False}
        if plain:
            body |= {"prompt": prompt, **sampling}
        else:
            body |= {"token_ids": prompt, "sampling_params": {**sampling, "logprobs": 1, "detokenize": False}}
        async with http.post(url, data=json.dumps(body).encode(), headers=headers) as reply:
            raw = await reply.read()
            if reply.status != 200:
                raise RuntimeError(f"{url} answered {reply.status}: {raw[:300]!r}")
            kind = reply.content_type
        if path == "binary":
            if kind != MEDIA_TYPE:
                raise RuntimeError(f"{url} has no binary answers, it sent {kind}; leave the path out with --paths")
            return len(decode(raw).choices[0].token_ids)
        answer = json.loads(raw)
        if plain:
            return int(answer["usage"]["completion_tokens"])
        choice = answer["choices"][0]
        token_ids = np.array(choice["token_ids"], np.int32)
        logprobs = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], np.float32)
        if len(token_ids) != len(logprobs):
            raise RuntimeError(f"{len(logprobs)} logprobs for {len(token_ids)} tokens")
        return len(token_ids)

    return one


async def _rollouts(target: Target, stack: AsyncExitStack, number: int) -> Callable[[], Awaitable[int]]:
    """One group of rollouts through the rollout service's servicer, up to the bytes of its messages."""
    sys.path.append(str(Path(__file__).parent / "tasksets"))  # verifiers loads tasksets as top-level modules
    from loguru import logger
    from opentelemetry.sdk.trace import TracerProvider

    from meshrl.rollout.config import RolloutConfig
    from meshrl.rollout.main import build
    from meshrl.rollout.service import RolloutServicer
    from meshrl.wire import convert
    from meshrl.wire.types import RolloutRequest

    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    config = RolloutConfig(
        client={"base_url": [target.url], "logprobs_mode": "processed_logprobs"},
        model={"name": target.model},
        tokenizer=target.tokenizer,
        renderer={"name": "default"},
        env=[{"id": "bench_words", "args": {"characters": max(1, target.prompt_tokens - TEMPLATE_TOKENS)}}],
        sampling={"max_tokens": target.new_tokens, "temperature": 1.0},
        seq_len=2 * target.prompt_tokens + target.new_tokens,
        max_concurrent=65536,
        output_dir=Path(target.tokenizer) / f"client_{number}",
    )
    servicer = RolloutServicer(await build(config, stack, TracerProvider().get_tracer("bench")))
    gc.collect()
    gc.freeze()  # as the program does
    next_task = 0

    async def one() -> int:
        nonlocal next_task
        next_task += 1
        request = RolloutRequest(
            request_id=str(uuid.uuid4()),
            group_id=str(uuid.uuid4()),
            environment="bench_words",
            task_index=next_task,
            group_size=target.group_size,
            deadline_s=600.0,
        )
        tokens = 0
        async for event in servicer.RunRollouts(convert.rollout_request_to_proto(request), None):
            event.SerializeToString()  # what gRPC would send
            if event.HasField("failure"):
                raise RuntimeError(f"a rollout failed: {event.failure.message}")
            if event.HasField("summary"):
                tokens = event.summary.sampled_tokens
        return tokens

    return one
