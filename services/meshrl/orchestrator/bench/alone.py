"""`orchestrator --bench` without services: starts stand-ins, and measures what a rollout costs this program."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from loguru import logger

from meshrl.core.config import ConfigError
from meshrl.core.config.shared import ServicesConfig

START_DEADLINE_S = 120.0
END_DEADLINE_S = 30.0
MOST_TOKENS = 1024
"""Of a rollout, without `sampling.max_tokens`."""


@asynccontextmanager
async def standing_in(names: Collection[str], *, seq_len: int, max_tokens: int | None) -> AsyncIterator[ServicesConfig]:
    """Starts stand-ins that host `names`; yields their addresses. Raises ConfigError if they do not start."""
    most = MOST_TOKENS if max_tokens is None else max_tokens + max_tokens // 3 + 1  # a quarter is the prompt's
    tokens = min(seq_len, most)
    order = {"seq_len": seq_len, "most_tokens": max(2, tokens), "names": sorted(names)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "meshrl.orchestrator.bench.stand_ins", json.dumps(order),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        try:
            port = (await asyncio.wait_for(process.stdout.readline(), START_DEADLINE_S)).decode().strip()
        except TimeoutError:
            port = ""
        if not port:
            raise ConfigError("orchestrator.bench: what stands in for the other programs did not start")
        address = f"127.0.0.1:{port}"
        logger.info("bench: no service is named, so made-up rollouts and a trainer that takes every batch stand in")
        yield ServicesConfig(rollout=[address], trainer=address, weights=address)
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_DEADLINE_S)
        except TimeoutError:
            process.kill()
            await process.wait()


class OwnCost:
    """CPU of this process from here on, for each rollout."""

    def __init__(self) -> None:
        self._began_s, self._cpu_s = time.perf_counter(), time.process_time()

    def summary(self, rollouts: int) -> str:
        wall_s, cpu_s = time.perf_counter() - self._began_s, time.process_time() - self._cpu_s
        if not rollouts:
            return "bench: no rollout was trained"
        return (
            f"bench: this program took {1e3 * cpu_s / rollouts:.2f} ms of CPU for each of {rollouts:,}"
            f" rollouts, {rollouts / wall_s:,.0f} a second"
        )
