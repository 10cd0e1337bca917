"""What a rollout server holds does not depend on how many rollouts it has played."""

import asyncio
import gc
import os
import threading
from collections import Counter

from polling import until


async def play(mesh, make_group, groups: int) -> None:
    for _ in range(groups):
        events = [event async for event in mesh.client.run_rollouts(make_group(group_size=2))]
        assert events[-1].finished == 2


def held() -> Counter[str]:
    """Open files, threads, tasks, and living objects of what belongs to one rollout."""
    gc.collect()
    kinds = Counter(type(found).__name__ for found in gc.get_objects())
    return Counter(
        files=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        tasks=len(asyncio.all_tasks()),
        **{
            name: kinds[name]
            for name in (
                "Session",
                "Trace",
                "RolloutSession",
                "ChatSession",
                "Episode",
                "LocalEpisodes",
                "_Playing",
                "EngineAnswer",
            )
        },
    )


async def test_forty_rollouts_leave_no_more_behind_than_ten(start_mesh, engine, make_group):
    mesh = await start_mesh([engine])
    await play(mesh, make_group, 5)
    await asyncio.sleep(0.1)  # what ends behind the last answer is not to be counted
    before = held()
    await play(mesh, make_group, 20)
    engine.requests.clear()
    # A thread or a connection more may come up; a leak is one a rollout, so 40.
    await until(lambda: max((held() - before).values(), default=0) < 10)
    assert len(mesh.runner._running) == 0
