"""The rollout service of one command, in its process and worker processes."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opentelemetry.trace import Tracer

from meshrl.client import ChannelOptions
from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.main import serve
from meshrl.sampling.pool import RolloutPool
from meshrl.sampling.retry import RunError

UNREACHABLE_S = 60.0
END_DEADLINE_S = 30.0


@asynccontextmanager
async def rollout_service(config: RolloutConfig, tracer: Tracer, *, startup_s: float) -> AsyncIterator[RolloutPool]:
    """Serves until the end of the block; yields its pool once it hosts every environment. Raises ConfigError and
    RunError."""
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(config, stop, tracer))
    options = ChannelOptions(reconnect_s=UNREACHABLE_S)
    pool = RolloutPool([config.server.address], unreachable_s=UNREACHABLE_S, options=options)
    gathering = asyncio.create_task(pool.gather([env.resolved_name for env in config.env], startup_s=startup_s))
    try:
        await asyncio.wait({serving, gathering}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            raise RunError("the rollout service ended before it served; see the log")
        await gathering
        async with pool.watching():
            yield pool
    finally:
        gathering.cancel()
        await asyncio.wait({gathering})
        await pool.close()
        stop.set()
        await asyncio.wait({serving}, timeout=END_DEADLINE_S)
        serving.cancel()
        await asyncio.gather(serving, gathering, return_exceptions=True)
        for worker in multiprocessing.active_children():  # whose start was broken off: Python's exit waits for them
            worker.kill()
