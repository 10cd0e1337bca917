"""Who must be there before a run begins, and how a service is weighed that comes back."""

import asyncio
from contextlib import suppress
from typing import Any

from meshrl.core.clock import Clock
from meshrl.sampling.hosts import GroupPlace, HostState, RolloutHost
from meshrl.sampling.pool import RolloutPool
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import EnvironmentInfo

INFO = EnvironmentInfo(name="echo", taskset="echo", num_tasks=1)


async def test_a_worker_that_comes_while_it_is_looked_for_is_not_missed() -> None:
    pool = RolloutPool([], unreachable_s=1.0, dial_in=("here", ("gpu-1",)))
    gathering = asyncio.create_task(pool.gather({"echo"}, startup_s=600.0))
    await asyncio.sleep(0.0)  # it has looked, and found nobody
    pool.table.hosts.append(RolloutHost(address="exchange/gpu-1", environments={"echo": INFO}, state=HostState.SERVING))
    pool.changed.beat()
    await asyncio.wait_for(gathering, 20.0)
    assert list(pool.environments()) == ["echo"]


class Service:
    """Answers looks; away while `why` is not empty."""

    def __init__(self, address: str) -> None:
        self.address, self.why = address, ""

    async def why_not_serving(self, deadline_s: float) -> str:
        return self.why

    async def list_environments(self, deadline_s: float) -> tuple[EnvironmentInfo, ...]:
        return (INFO,)

    async def get_status(self, deadline_s: float) -> Any:
        raise MeshError(Reason.NOT_SUPPORTED, "")

    async def close(self) -> None:
        pass


async def test_what_a_service_left_standing_while_it_was_away_does_not_make_it_slow() -> None:
    now_s = 0.0

    async def sleep(seconds: float) -> None:
        await asyncio.Event().wait()

    pool = RolloutPool([], unreachable_s=600.0, clock=Clock(now=lambda: now_s, sleep=sleep))
    stays, leaves = Service("stays"), Service("leaves")
    for service in (stays, leaves):
        pool.join(service, patience_s=600.0, is_new_process=False)  # type: ignore[arg-type]
    stayed, back = pool.table.hosts
    await pool.look(stayed)
    await pool.look(back)
    stayed.achievement("echo").count(now_s, begun=4)
    now_s = 1.0
    stayed.achievement("echo").count(now_s, finished=4)
    place = GroupPlace(environment="echo", left=4, since_s=now_s, group_id="lost")
    with suppress(MeshError), pool.at(place, back, asyncio.Timeout(None)):
        leaves.why = "nobody answers"
        await pool.look(back)
        now_s = 31.0  # until its stream is seen to be broken
        raise MeshError(Reason.UNREACHABLE, "")
    leaves.why = ""
    await pool.look(back)
    stayed.groups["other"] = GroupPlace(environment="echo", left=4, since_s=now_s)
    assert pool.table.choose("echo", 4, now_s) is back
    await pool.close()
