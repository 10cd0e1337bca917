"""The start of a pool: who must be there before a run begins."""

import asyncio

from meshrl.sampling.hosts import HostState, RolloutHost
from meshrl.sampling.pool import RolloutPool
from meshrl.wire.types import EnvironmentInfo


async def test_a_worker_that_comes_while_it_is_looked_for_is_not_missed() -> None:
    pool = RolloutPool([], unreachable_s=1.0, dial_in=("here", ("gpu-1",)))
    gathering = asyncio.create_task(pool.gather({"echo"}, startup_s=600.0))
    await asyncio.sleep(0.0)  # it has looked, and found nobody
    info = EnvironmentInfo(name="echo", taskset="echo", num_tasks=1)
    pool.table.hosts.append(RolloutHost(address="exchange/gpu-1", environments={"echo": info}, state=HostState.SERVING))
    pool.changed.beat()
    await asyncio.wait_for(gathering, 20.0)
    assert list(pool.environments()) == ["echo"]
