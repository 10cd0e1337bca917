"""CPU that the rollout service itself spends on a wave of rollouts that end together; nothing is played.

    python tests/benchmarks/bench_groups.py [--rollouts 4096] [--group-size 8] [--concurrent 4096] [--repeats 3]

All rollouts are admitted, wait for one event, and end in the same turn of the event loop. What is measured is counting,
starting what waits and streaming: from the event until every group's stream has ended. `--concurrent` below
`--rollouts` has the rest wait for slots.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid

import numpy as np

from meshrl.rollout.config import ClientConfig
from meshrl.rollout.engines.capacity import RolloutLimit
from meshrl.rollout.engines.engine_table import EngineTable
from meshrl.rollout.engines.router import EngineRouter
from meshrl.rollout.group_runner import GroupRunner
from meshrl.rollout.groups import GroupTable
from meshrl.wire.types import EnvironmentInfo, Rollout, RolloutRequest, Sample, Sampling, VersionSpan

TOKENS = 64
ENVIRONMENT = "nothing"


class Wave:
    """A player whose rollouts all end when `end` is set."""

    info = EnvironmentInfo(name=ENVIRONMENT, taskset=ENVIRONMENT, num_tasks=None, agents=())

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def open(self, request: RolloutRequest) -> WaveGroup:
        return WaveGroup(request, self.end)


class WaveGroup:
    def __init__(self, request: RolloutRequest, end: asyncio.Event) -> None:
        self._request, self._end = request, end
        mask = np.arange(TOKENS) >= TOKENS // 2
        self._sample = Sample(
            token_ids=np.ones(TOKENS, np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
            version_spans=(VersionSpan(start=TOKENS // 2, end=TOKENS, version=0),),
            temperature=1.0,
        )

    async def play(self, index: int) -> tuple[Rollout, ...]:
        await self._end.wait()
        request = self._request
        return (
            Rollout(
                rollout_id=str(uuid.uuid4()),
                group_id=request.group_id,
                task_key=str(request.task_index),
                environment=request.environment,
                samples=(self._sample,),
                reward=0.0,
                finish_reason="stop",
            ),
        )

    def doing(self, index: int) -> str:
        return "waiting for the wave"


async def one_wave(rollouts: int, group_size: int, concurrent: int) -> tuple[float, float]:
    """(CPU seconds to admit and start, CPU seconds from the event to the last stream's end)."""
    wave = Wave()
    table = GroupTable(max_concurrent=concurrent, max_queued=rollouts)
    router = EngineRouter(EngineTable(["http://nobody"]), ClientConfig())
    runner = GroupRunner({ENVIRONMENT: wave}, table, router, RolloutLimit(concurrent))

    async def stream(number: int) -> None:
        request = RolloutRequest(
            request_id=str(uuid.uuid4()),
            group_id=f"group-{number}",
            environment=ENVIRONMENT,
            task_index=number,
            group_size=group_size,
            sampling=Sampling(),
            deadline_s=600.0,
        )
        async for _ in runner.run(request):
            pass

    began_s = time.process_time()
    streams = [asyncio.create_task(stream(number)) for number in range(rollouts // group_size)]
    expected = (min(concurrent, rollouts), max(0, rollouts - concurrent))
    while (table.running, table.queued) != expected:  # noqa: ASYNC110  # nobody is told of the table's counters
        await asyncio.sleep(0)
    started_s = time.process_time()
    wave.end.set()
    await asyncio.gather(*streams)
    return started_s - began_s, time.process_time() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4096)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--concurrent", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"{options.rollouts} rollouts in groups of {options.group_size}, {options.concurrent} at once")
    print("  start (CPU s)  end (CPU s)  end (ms a rollout)")
    for _ in range(options.repeats):
        start_s, end_s = asyncio.run(one_wave(options.rollouts, options.group_size, options.concurrent))
        print(f"  {start_s:13.3f}  {end_s:11.3f}  {1000 * end_s / options.rollouts:18.3f}")


if __name__ == "__main__":
    main()
