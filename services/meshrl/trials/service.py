"""The rollout service of one command, in its process and worker processes."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager

from meshrl.client import ChannelOptions
from meshrl.sampling.pool import RolloutPool
from meshrl.sampling.retry import RunError
from meshrl.trials.plan import TaskSpan
from meshrl.wire.types import EnvironmentInfo

UNREACHABLE_S = 60.0
END_DEADLINE_S = 30.0


@asynccontextmanager
async def rollout_service(
    serve: Callable[[asyncio.Event], Coroutine[None, None, int]],
    address: str,
    names: Sequence[str],
    *,
    startup_s: float,
) -> AsyncIterator[RolloutPool]:
    """Serves at `address` until the end of the block; yields its pool once it hosts `names`. Raises ConfigError and
    RunError."""
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(stop))
    options = ChannelOptions(reconnect_s=UNREACHABLE_S)
    pool = RolloutPool([address], unreachable_s=UNREACHABLE_S, options=options)
    gathering = asyncio.create_task(pool.gather(names, startup_s=startup_s))
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


def task_spans(wanted_of: Mapping[str, tuple[int, int]], infos: Mapping[str, EnvironmentInfo]) -> list[TaskSpan]:
    """The tasks to play of each environment: so many (-1 for all), with so many rollouts each. Raises RunError for one
    without end."""
    spans: list[TaskSpan] = []
    for name, (wanted, group_size) in wanted_of.items():
        there = infos[name].num_tasks
        if there is None and wanted < 0:
            raise RunError(f"{name} never runs out of tasks; say how many to play (--num-examples 100)")
        tasks = wanted if there is None else there if wanted < 0 else min(wanted, there)
        spans.append(TaskSpan(environment=name, tasks=tasks, group_size=group_size))
    return spans
