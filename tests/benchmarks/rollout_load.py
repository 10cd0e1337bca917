"""Client processes of bench_rollouts: each keeps its share of the requests in flight and says what came back.

`LoadProcess` is the parent's end of one; `rollout_paths` plays episodes in it. Only the standard library, aiohttp and
numpy are loaded before a path needs more, so that `Target.source` can say which tree of this project it is taken from.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
ROUTES = {"completions": COMPLETIONS, "json": GENERATE, "binary": GENERATE}
PLAYED = ("rollouts", "reverse", "tools", "envserver")
"""Paths that play episodes, in requests or (tools) turns."""
TOOL_TURNS = 4
LAG_EVERY_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to call, and with what. `source`: another checkout of this project, to take the rollout service from."""

    url: str
    model: str
    api_key: str | None
    prompt_tokens: int
    new_tokens: int
    vocab_size: int
    tokenizer: str
    group_size: int
    source: str | None = None
    profile: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, kw_only=True)
class Load:
    """One process's share of a measurement; times of the wall clock, so that processes can be compared.

    `lags_s`: how late a timer of the event loop was, every 5 ms.
    """

    requests: int
    tokens: int
    started_s: float
    ended_s: float
    cpu_s: float
    lags_s: list[float]


Play = Callable[[], Awaitable[int]]
"""Makes one request (or group of rollouts) and says how many tokens came back."""


class Process:
    """A process of a benchmark and the pipe to it; None through the pipe ends it."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None  # it is started
        return self._process.pid

    async def answer(self) -> Any:
        """A text that is no URL is a failure, which ends the benchmark."""
        found = await asyncio.to_thread(self.pipe.recv)
        if isinstance(found, str) and not found.startswith("http"):
            raise SystemExit(found)
        return found

    def close(self) -> None:
        with suppress(OSError):  # it has ended
            self.pipe.send(None)
        self._process.join(timeout=20)
        self._process.kill()


class LoadProcess(Process):
    """A client process. `run` may be called again and again; the connections and the rollout service stay."""

    def __init__(self, target: Target, number: int) -> None:
        super().__init__(_main, target, number)

    async def run(self, path: str, concurrency: int, requests: int, *, profile: bool = True) -> Load:
        """`profile`: False where `Target.profile` is not to be followed, as in a warm-up."""
        self.pipe.send((path, concurrency, requests, profile))
        load: Load = await self.answer()
        return load


def _main(pipe: Connection, target: Target, number: int) -> None:
    if target.source is not None:
        sys.path[:0] = [f"{target.source}/services", f"{target.source}/clients/python"]
        for name in [name for name in sys.modules if name.partition(".")[0] == "meshrl"]:
            del sys.modules[name]  # what the benchmark itself had loaded from this tree
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
        draw = np.random.default_rng(number)
        plays: dict[str, Play] = {}
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            path, concurrency, requests, profile = order
            try:
                if path in PLAYED and path not in plays:
                    from rollout_paths import open_path

                    plays[path] = await open_path(path, target, stack, number)
                one = plays[path] if path in PLAYED else _http(path, target, http, draw)
                measured = measure(one, concurrency, requests)
                pipe.send(await (_profiled(target, number, path, measured) if profile else measured))
            except Exception as error:  # noqa: BLE001 - the parent ends the benchmark with it
                pipe.send(f"the load of path {path} failed: {error!r}")


async def _profiled(target: Target, number: int, path: str, measured: Awaitable[Load]) -> Load:
    """Measures; with a profile of the first client's process where one is asked for."""
    if target.profile is None or number != 0:
        return await measured
    profile = cProfile.Profile(time.process_time)
    profile.enable()
    try:
        return await measured
    finally:
        profile.disable()
        profile.dump_stats(str(Path(target.profile) / f"{path}.prof"))


async def measure(one: Play, concurrency: int, requests: int) -> Load:
    """Keeps `concurrency` calls of `one` under way until `requests` are made; each says how many tokens it got."""
    left, tokens = requests, 0

    async def keep_going() -> None:
        nonlocal left, tokens
        while left > 0:
            left -= 1
            got = await one()
            tokens += got

    lags_s: list[float] = []
    watch = asyncio.create_task(_watch_loop(lags_s))
    started_s, cpu_s = time.time(), time.process_time()
    try:
        await asyncio.gather(*(keep_going() for _ in range(concurrency)))
    finally:
        watch.cancel()
    return Load(
        requests=requests,
        tokens=tokens,
        started_s=started_s,
        ended_s=time.time(),
        cpu_s=time.process_time() - cpu_s,
        lags_s=lags_s,
    )


async def _watch_loop(lags_s: list[float]) -> None:
    """Notes how late the event loop comes back to a timer."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        lags_s.append(max(0.0, loop.time() - due))


def _http(path: str, target: Target, http: aiohttp.ClientSession, draw: np.random.Generator) -> Play:
    """One request over HTTP, read as a client must read it: token ids and, but for completions, logprobs as arrays."""
    from meshrl.wire.completion_frame import MEDIA_TYPE, decode

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
