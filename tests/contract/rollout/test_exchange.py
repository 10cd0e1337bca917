"""A worker that dials in: plays as a RolloutService does, over links that break and processes that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cut_link import CutLink
from meshrl.client.exchange import ExchangeClient
from meshrl.core.clock import Clock
from meshrl.orchestrator.exchange.config import ExchangeConfig
from meshrl.orchestrator.exchange.service import RolloutExchange
from meshrl.rollout.exchange.config import ExchangeLinkConfig
from meshrl.rollout.exchange.spool import ResultSpool
from meshrl.rollout.exchange.worker import ExchangeWorker
from meshrl.sampling.attempts import SamplerDeadlines
from meshrl.sampling.groups import GroupTicket, TaskRef
from meshrl.sampling.hosts import HostState
from meshrl.sampling.pool import RolloutPool
from meshrl.sampling.sampler import GroupSampler
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Rollout, RolloutEvent, RolloutSummary, Sampling

pytestmark = pytest.mark.timeout(240)
DEADLINE_S = 90.0


@dataclass
class Orchestrator:
    """What a run has of the exchange: its server, the pool of services, and who samples groups there."""

    exchange: RolloutExchange
    pool: RolloutPool
    address: str

    @property
    def sampler(self) -> GroupSampler:
        deadlines = SamplerDeadlines(group_s=DEADLINE_S, retry_s=DEADLINE_S, unreachable_s=1.0)
        return GroupSampler(self.pool, deadlines=deadlines, clock=Clock())


def ticket(group_id: str, size: int) -> GroupTicket:
    task = TaskRef(environment="mesh_echo", index=0)
    return GroupTicket(group_id=group_id, task=task, size=size, for_step=1, min_version=0, active_version=0, seed=None)


@asynccontextmanager
async def orchestrating(**terms: float) -> AsyncIterator[Orchestrator]:
    config = ExchangeConfig(port=0, **{"heartbeat_s": 20.0, "lease_s": 60.0, **terms})
    pool = RolloutPool([], unreachable_s=1.0, dial_in=("here", ()))
    exchange = RolloutExchange(config, pool)
    port = await exchange.start()
    try:
        yield Orchestrator(exchange, pool, f"127.0.0.1:{port}")
    finally:
        await exchange.close()
        await pool.close()


@asynccontextmanager
async def working(runner, address: str, spool: Path, name: str = "box") -> AsyncIterator[ExchangeWorker]:
    """A worker process, which ends at once at the end of the block."""
    file = ResultSpool(spool)
    worker = ExchangeWorker(ExchangeLinkConfig(address=address), runner, file, name=name, max_queued=64)
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        running.cancel()
        await asyncio.wait({running})
        file.close()


def held(gate: asyncio.Event, when: Callable[[], bool] = lambda: True) -> Callable[..., Any]:
    """Model calls wait at the gate; those that come while `when` says no pass by it."""

    async def hold(request: Any, body: Any) -> None:
        if when():
            await gate.wait()

    return hold


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110  # what another program says of itself
            await asyncio.sleep(0.02)


async def test_groups_are_played_over_links_that_break_and_each_rollout_is_booked_once(
    start_mesh, make_engine, tmp_path: Path
) -> None:
    engine = await make_engine().start()
    gate = asyncio.Event()
    engine.on_call = held(gate, lambda: len(engine.requests) > 4)
    booked: list[RolloutEvent] = []
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        runner = (await start_mesh([engine])).runner
        run = await stack.enter_async_context(orchestrating())
        link = stack.enter_context(CutLink(run.address))
        worker = await stack.enter_async_context(working(runner, link.address, tmp_path / "spool.sqlite"))
        await run.pool.gather({"mesh_echo"}, startup_s=DEADLINE_S)
        playing = asyncio.create_task(run.sampler.sample(ticket("g1", 12), sampling=Sampling(), on_event=booked.append))
        await until(lambda: len(booked) == 4)
        await asyncio.to_thread(link.cut)
        await until(lambda: not worker.attached.is_set() and run.pool.table.hosts[0].state is HostState.AWAY)
        gate.set()
        await until(lambda: runner.status().running == 0)  # it has played on
        assert len(booked) == 4
        link.mend()
        group = await asyncio.wait_for(playing, DEADLINE_S)
        rollouts = [event for event in booked if isinstance(event, Rollout)]
        assert len({rollout.rollout_id for rollout in rollouts}) == len(rollouts) == len(group.rollouts) == 12
        assert group.failures == []
        assert isinstance(booked[-1], RolloutSummary)
        assert len(engine.requests) == 12  # nothing was played twice
        await until(lambda: worker._outbox.is_empty)
        async with ExchangeClient(run.address) as client:
            (told,) = await client.list_workers()
        assert (told.worker, told.attached, told.calls, told.attachments) == ("box", True, 0, 2)
        assert run.pool.table.hosts[0].achievement("mesh_echo").tokens > 0


async def test_what_a_killed_worker_had_in_its_spool_is_taken_and_only_the_rest_is_played_again(
    start_mesh, make_engine, tmp_path: Path
) -> None:
    engine = await make_engine().start()
    gate = asyncio.Event()
    engine.on_call = held(gate, lambda: len(engine.requests) > 4)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        runner = (await start_mesh([engine])).runner
        run = await stack.enter_async_context(orchestrating())
        link = stack.enter_context(CutLink(run.address))
        spool = tmp_path / "spool.sqlite"
        async with working(runner, link.address, spool):
            await run.pool.gather({"mesh_echo"}, startup_s=DEADLINE_S)
            playing = asyncio.create_task(run.sampler.sample(ticket("g1", 8), sampling=Sampling()))
            await until(lambda: len(engine.requests) == 8)
            await asyncio.to_thread(link.cut)
            await until(lambda: runner.status().finished == 4)
        await until(lambda: runner.status().running == 0)
        gate.set()
        link.mend()
        async with working(runner, link.address, spool) as worker:
            group = await asyncio.wait_for(playing, DEADLINE_S)
            assert len({rollout.rollout_id for rollout in group.rollouts}) == len(group.rollouts) == 8
            assert len(engine.requests) == 12  # four came from the spool
            await until(lambda: worker._outbox.is_empty)


async def test_groups_of_a_lease_that_ran_out_go_to_others_and_late_results_are_not_needed(
    start_mesh, make_engine, tmp_path: Path
) -> None:
    slow, quick = await make_engine().start(), await make_engine().start()
    gate = asyncio.Event()
    slow.on_call = held(gate)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(slow.stop)
        stack.push_async_callback(quick.stop)
        first, second = (await start_mesh([slow])).runner, (await start_mesh([quick])).runner
        run = await stack.enter_async_context(orchestrating(heartbeat_s=0.5, lease_s=1.5))
        link = stack.enter_context(CutLink(run.address))
        late = await stack.enter_async_context(working(first, link.address, tmp_path / "1.sqlite", "late"))
        await run.pool.gather({"mesh_echo"}, startup_s=DEADLINE_S)
        playing = asyncio.create_task(run.sampler.sample(ticket("g1", 4), sampling=Sampling()))
        await until(lambda: len(slow.requests) == 4)
        await stack.enter_async_context(working(second, run.address, tmp_path / "2.sqlite", "steady"))
        await until(lambda: len(run.pool.table.hosts) == 2)
        await asyncio.to_thread(link.cut)
        group = await asyncio.wait_for(playing, DEADLINE_S)
        assert len(group.rollouts) == len(quick.requests) == 4
        gate.set()
        link.mend()
        await until(lambda: late.attached.is_set() and late._outbox.is_empty)
        assert len(group.rollouts) == 4


async def test_a_worker_that_drains_gets_nothing_new_and_what_it_has_is_taken(
    start_mesh, make_engine, tmp_path: Path
) -> None:
    engine = await make_engine().start()
    gate = asyncio.Event()
    engine.on_call = held(gate)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        runner = (await start_mesh([engine])).runner
        run = await stack.enter_async_context(orchestrating())
        worker = await stack.enter_async_context(working(runner, run.address, tmp_path / "spool.sqlite"))
        await run.pool.gather({"mesh_echo"}, startup_s=DEADLINE_S)
        playing = asyncio.create_task(run.sampler.sample(ticket("g1", 4), sampling=Sampling()))
        await until(lambda: len(engine.requests) == 4)
        draining = asyncio.create_task(runner.drain(DEADLINE_S))
        await asyncio.sleep(0)
        worker.say_now()
        await until(lambda: run.pool.table.hosts[0].state is HostState.DRAINING)
        gate.set()
        assert len((await asyncio.wait_for(playing, DEADLINE_S)).rollouts) == 4
        await asyncio.wait_for(draining, DEADLINE_S)


async def test_what_an_orchestrator_does_not_take_is_named(tmp_path: Path, start_mesh, engine) -> None:
    runner = (await start_mesh([engine])).runner
    async with orchestrating() as run:
        unnamed = ExchangeWorker(
            ExchangeLinkConfig(address=run.address), runner, ResultSpool(tmp_path / "s"), name="a/b", max_queued=1
        )
        with pytest.raises(MeshError) as refused:
            await asyncio.wait_for(unnamed.run(), DEADLINE_S)
        unnamed._spool.close()
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert "hello.worker: must hold no slash" in str(refused.value)
