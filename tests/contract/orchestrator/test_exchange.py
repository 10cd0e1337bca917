"""A worker that dials in: plays as a RolloutService does, over links that break and processes that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from opentelemetry.trace import get_tracer

from cut_link import CutLink
from local_ports import free_port
from meshrl.cli.status import _dialled_in
from meshrl.client import ChannelOptions
from meshrl.client.authority import Authority
from meshrl.client.credentials import CredentialFiles, Credentials, credentials_of
from meshrl.client.exchange import ExchangeClient
from meshrl.client.trust import Role
from meshrl.core.clock import Clock
from meshrl.core.config import ConfigError
from meshrl.orchestrator.exchange.config import ExchangeConfig
from meshrl.orchestrator.exchange.service import RolloutExchange
from meshrl.orchestrator.main import orchestrate
from meshrl.rollout.config import ExchangeLinkConfig
from meshrl.rollout.engines.capacity import RolloutLimit
from meshrl.rollout.engines.engine_table import EngineTable, Requirement
from meshrl.rollout.exchange.spool import ResultSpool
from meshrl.rollout.exchange.worker import ExchangeWorker
from meshrl.rollout.groups import Admissions
from meshrl.rollout.runner import RolloutRunner
from meshrl.sampling.hosts import HostState
from meshrl.sampling.pool import RolloutPool
from meshrl.sampling.sampler import RolloutSampler
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import EnvironmentInfo, Rollout, RolloutEvent, RolloutRequest, RolloutSummary, Sampling
from polling import until
from run_output import assert_exact
from scripted_services import finished_rollout, ticket

DEADLINE_S = 120.0


class Servers:
    """Engines that have every version."""

    def __init__(self) -> None:
        self.engines = EngineTable([])
        self.on_look: Callable[[], None] = lambda: None

    async def require(self, need: Requirement) -> None:
        pass


class Plays:
    """Plays `echo`, whose rollouts wait at the gate but for the first `free` ones; `begun` counts them."""

    info = EnvironmentInfo(name="echo", taskset="echo", num_tasks=50)

    def __init__(self, free: int = 0, version: Callable[[], int] = lambda: 0) -> None:
        self.free, self.begun, self.gate, self.version = free, 0, asyncio.Event(), version

    def runner(self) -> RolloutRunner:
        """What stands behind a rollout service that hosts it."""
        limit = RolloutLimit(16)
        table = Admissions(max_concurrent=limit.rollouts, max_queued=64)
        return RolloutRunner({"echo": self}, table, Servers(), limit)

    async def open(self, request: RolloutRequest) -> OpenGroup:
        return OpenGroup(self, request)


class OpenGroup:
    """One group of it."""

    late_s = 0.0

    def __init__(self, plays: Plays, request: RolloutRequest) -> None:
        self._plays, self._request = plays, request

    async def play(self, index: int) -> tuple[Rollout, ...]:
        self._plays.begun += 1
        if self._plays.begun > self._plays.free:
            await self._plays.gate.wait()
        return (finished_rollout(self._request, float(index), self._plays.version()),)

    def stage(self, index: int) -> None:
        return None

    def close(self) -> None:
        pass


@dataclass
class Orchestrator:
    """What a run has of the exchange: its server, the pool of services, and who samples groups there."""

    exchange: RolloutExchange
    pool: RolloutPool
    address: str

    def received_of(self, name: str) -> int:
        """Events of the calls that a worker has now."""
        return sum(call.received for call in self.exchange.workers[name]._book.calls.values())

    @property
    def sampler(self) -> RolloutSampler:
        return RolloutSampler(self.pool, group_s=DEADLINE_S, retry_s=DEADLINE_S, clock=Clock())


@asynccontextmanager
async def orchestrating(credentials: Credentials | None = None, **terms: float) -> AsyncIterator[Orchestrator]:
    config = ExchangeConfig(port=0, **{"heartbeat_s": 20.0, "lease_s": 60.0, **terms})
    pool = RolloutPool([], unreachable_s=1.0, dial_in=("here", ()))
    exchange = RolloutExchange(config, pool, credentials=credentials)
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


async def test_groups_are_played_over_links_that_break_and_each_rollout_is_booked_once(tmp_path: Path) -> None:
    plays = Plays(free=4)
    runner = plays.runner()
    booked: list[RolloutEvent] = []
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(orchestrating())
        link = stack.enter_context(CutLink(run.address))
        worker = await stack.enter_async_context(working(runner, link.address, tmp_path / "spool.sqlite"))
        await run.pool.gather({"echo"}, startup_s=DEADLINE_S)
        playing = asyncio.create_task(
            run.sampler.sample(ticket("g1", size=12), sampling=Sampling(), on_event=booked.append)
        )
        await until(lambda: len(booked) == 4)
        await asyncio.to_thread(link.cut)
        await until(lambda: not worker.attached.is_set() and run.pool.table.hosts[0].state is HostState.AWAY)
        plays.gate.set()
        await until(lambda: runner.status().running == 0)  # it has played on
        assert len(booked) == 4
        link.mend()
        group = await asyncio.wait_for(playing, DEADLINE_S)
        rollouts = [event for event in booked if isinstance(event, Rollout)]
        assert len({rollout.rollout_id for rollout in rollouts}) == len(rollouts) == len(group.rollouts) == 12
        assert group.failures == []
        assert isinstance(booked[-1], RolloutSummary)
        assert plays.begun == 12  # nothing was played twice
        await until(lambda: worker._outbox.is_empty)
        async with ExchangeClient(run.address) as client:
            (told,) = await client.list_workers()
        assert (told.worker, told.attached, told.calls, told.attachments) == ("box", True, 0, 2)
        (row,) = await _dialled_in(run.address, ChannelOptions())
        assert (row.service, row.address, row.state) == ("rollout", "exchange/box", "without engines")
        assert row.figures["finished"] <= 12
        host = run.pool.table.hosts[0]
        await until(lambda: host.state is HostState.SERVING)  # the look may come after the rollouts, which count
        assert (host.achievement("echo").tokens > 0, host.achievement("echo").in_flight) == (True, 0)


async def test_what_a_killed_worker_had_in_its_spool_is_taken_and_only_the_rest_is_played_again(tmp_path: Path) -> None:
    first, second, spool = Plays(free=4), Plays(free=99), tmp_path / "spool.sqlite"
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(orchestrating())
        link = stack.enter_context(CutLink(run.address))
        async with working(first.runner(), link.address, spool) as worker:
            await run.pool.gather({"echo"}, startup_s=DEADLINE_S)
            await asyncio.to_thread(link.cut)
            first.free = 0
            link.mend()
            await until(lambda: worker.attached.is_set() and run.exchange.workers["box"].attachments == 2)
            playing = asyncio.create_task(run.sampler.sample(ticket("g1", size=8), sampling=Sampling()))
            await until(lambda: first.begun == 8)
            await asyncio.to_thread(link.cut)
            first.gate.set()
            first.gate = asyncio.Event()
            await until(lambda: len(worker._spool.read()) == 10)  # eight rollouts, the summary, the end
        link.mend()
        async with working(second.runner(), link.address, spool) as worker:
            group = await asyncio.wait_for(playing, DEADLINE_S)
            assert len({rollout.rollout_id for rollout in group.rollouts}) == len(group.rollouts) == 8
            assert second.begun == 0  # all came from the spool
            await until(lambda: worker._outbox.is_empty)
            second.free = 2
            playing = asyncio.create_task(run.sampler.sample(ticket("g2", size=6), sampling=Sampling()))
            await until(lambda: second.begun == 6 and run.received_of("box") == 2)
        third = Plays(free=99)
        async with working(third.runner(), link.address, spool):
            group = await asyncio.wait_for(playing, DEADLINE_S)
            assert len({rollout.rollout_id for rollout in group.rollouts}) == len(group.rollouts) == 6
            assert third.begun == 4


async def test_groups_of_a_lease_that_ran_out_go_to_others_and_late_results_are_not_needed(tmp_path: Path) -> None:
    slow, quick = Plays(), Plays(free=99)
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(orchestrating(heartbeat_s=0.5, lease_s=1.5))
        link = stack.enter_context(CutLink(run.address))
        late = await stack.enter_async_context(working(slow.runner(), link.address, tmp_path / "1.sqlite", "late"))
        await run.pool.gather({"echo"}, startup_s=DEADLINE_S)
        playing = asyncio.create_task(run.sampler.sample(ticket("g1", size=4), sampling=Sampling()))
        await until(lambda: slow.begun == 4)
        await stack.enter_async_context(working(quick.runner(), run.address, tmp_path / "2.sqlite", "steady"))
        await until(lambda: len(run.pool.table.hosts) == 2)
        await asyncio.to_thread(link.cut)
        group = await asyncio.wait_for(playing, DEADLINE_S)
        assert len(group.rollouts) == 4
        assert quick.begun >= 4
        slow.gate.set()
        link.mend()
        await until(lambda: late.attached.is_set() and late._outbox.is_empty)
        assert len(group.rollouts) == 4


async def test_a_worker_that_drains_gets_nothing_new_and_what_it_has_is_taken(tmp_path: Path) -> None:
    plays = Plays()
    runner = plays.runner()
    async with orchestrating() as run, working(runner, run.address, tmp_path / "spool.sqlite") as worker:
        await run.pool.gather({"echo"}, startup_s=DEADLINE_S)
        playing = asyncio.create_task(run.sampler.sample(ticket("g1", size=4), sampling=Sampling()))
        await until(lambda: plays.begun == 4)
        draining = asyncio.create_task(runner.drain(DEADLINE_S))
        await asyncio.sleep(0)
        worker.beat_now()
        await until(lambda: run.pool.table.hosts[0].state is HostState.DRAINING)
        plays.gate.set()
        assert len((await asyncio.wait_for(playing, DEADLINE_S)).rollouts) == 4
        await asyncio.wait_for(draining, DEADLINE_S)


async def test_no_more_is_sent_than_there_is_credit_for_and_no_more_is_asked_than_there_is_room(tmp_path: Path) -> None:
    plays = Plays(free=99)
    async with (
        orchestrating(window=2) as run,
        working(plays.runner(), run.address, tmp_path / "spool.sqlite") as worker,
    ):
        await run.pool.gather({"echo"}, startup_s=DEADLINE_S)
        dialled_in = run.exchange.workers["box"]
        request = RolloutRequest(
            request_id="2f1c59a4-0b6e-4c5e-9c3e-7b1f6d2a8e10",
            group_id="g",
            environment="echo",
            task_index=0,
            group_size=6,
            deadline_s=DEADLINE_S,
        )
        async with aclosing(dialled_in.run_rollouts(request)) as events:
            first = await anext(events)
            await until(lambda: worker._outbox.calls[0].last_seq == 8)
            await until(lambda: len(dialled_in._book.calls) == 1)
            (call,) = dialled_in._book.calls.values()
            await until(lambda: call.received == 2)
            rest = [event async for event in events]
        assert len({event.rollout_id for event in (first, *rest[:-1])}) == 6
        with pytest.raises(MeshError) as refused:
            await anext(
                dialled_in.run_rollouts(
                    replace(request, request_id="8d3f0a52-6c1b-4f7d-a2e9-5b0c4d7e9f13", group_size=999)
                )
            )
        assert refused.value.reason is Reason.OVERLOADED


async def test_a_run_of_workers_that_are_killed_and_cut_off_loses_nothing_and_books_nothing_twice(
    mesh, script, make_config, tmp_path: Path
) -> None:
    """The whole orchestrator with its ledger; every worker listens nowhere."""
    port = free_port()
    config = make_config(
        mesh.services.model_copy(update={"rollout": []}),
        max_steps=10,
        max_async_level=2,
        deadlines={"startup_s": DEADLINE_S, "unreachable_s": 1.0},
        exchange={"port": port, "heartbeat_s": 20.0, "lease_s": 60.0, "workers": ["a", "b"]},
    )
    first, second, third = (Plays(10**6, lambda: max(0, script.engine_version)) for _ in range(3))
    run = asyncio.create_task(orchestrate(config, asyncio.Event(), get_tracer("test")))
    async with AsyncExitStack() as stack:
        link = stack.enter_context(CutLink(f"127.0.0.1:{port}"))
        b = await stack.enter_async_context(working(second.runner(), link.address, tmp_path / "b.sqlite", "b"))
        async with working(first.runner(), f"127.0.0.1:{port}", tmp_path / "a.sqlite", "a") as a:
            await until(lambda: script.trained_version >= 2)
            first.free, second.free = first.begun + 2, second.begun + 2
            await until(lambda: first.begun > first.free and second.begun > second.free)
            await asyncio.to_thread(link.cut)
            await until(lambda: not b.attached.is_set())
            second.gate.set()
            held = a._outbox.calls
        assert held  # the one that is killed had groups
        trained = script.trained_version
        link.mend()
        async with working(third.runner(), f"127.0.0.1:{port}", tmp_path / "a.sqlite", "a"):
            assert await asyncio.wait_for(run, DEADLINE_S) == 0
    assert (trained < 10, script.trained_version) == (True, 10)
    assert third.begun > 0
    report = assert_exact(tmp_path, 10)
    assert {state for state, _ in report.counts} <= {"trained", "cancelled"}, report.table()
    assert sum(count for (state, _), count in report.counts.items() if state == "trained") == 10 * 8


async def test_only_a_rollout_worker_of_the_run_may_dial_in_and_nobody_takes_the_name_of_another(
    tmp_path: Path,
) -> None:
    authority = Authority.create(tmp_path / "credentials", "main")

    def member(role: Role, name: str) -> Credentials:
        authority.issue(tmp_path / name, role, name)
        return credentials_of(replace(CredentialFiles.of_folder(tmp_path / name), trust=authority.trust.path))

    async def refused(credentials: Credentials) -> MeshError:
        file = ResultSpool(tmp_path / "refused.sqlite")
        worker = ExchangeWorker(
            ExchangeLinkConfig(address=run.address), Plays().runner(), file, name="box", max_queued=1,
            options=ChannelOptions(credentials=credentials),
        )  # fmt: skip
        with pytest.raises(MeshError) as error:
            await asyncio.wait_for(worker.run(), DEADLINE_S)
        file.close()
        return error.value

    async with orchestrating(member(Role.ORCHESTRATOR, "o")) as run:
        box = ResultSpool(tmp_path / "box.sqlite")
        worker = ExchangeWorker(
            ExchangeLinkConfig(address=run.address), Plays(free=9).runner(), box, name="box", max_queued=8,
            options=ChannelOptions(credentials=member(Role.ROLLOUT, "box")),
        )  # fmt: skip
        running = asyncio.create_task(worker.run())
        await run.pool.gather({"echo"}, startup_s=DEADLINE_S)
        assert len((await run.sampler.sample(ticket("g", size=4), sampling=Sampling())).rollouts) == 4
        assert "for: rollout" in (await refused(member(Role.AGENT, "engine"))).message
        other = await refused(member(Role.ROLLOUT, "other"))
        assert (other.reason, "is that of a worker of rollout/box" in other.message) == (Reason.PERMISSION_DENIED, True)
        assert worker.attached.is_set()
        running.cancel()
        await asyncio.wait({running})
        box.close()


async def test_a_name_that_nobody_may_have_is_named_at_once(tmp_path: Path) -> None:
    async with orchestrating() as run:
        file = ResultSpool(tmp_path / "s")
        unnamed = ExchangeWorker(
            ExchangeLinkConfig(address=run.address), Plays().runner(), file, name="a/b", max_queued=1
        )
        with pytest.raises(MeshError) as refused:
            await asyncio.wait_for(unnamed.run(), DEADLINE_S)
        with pytest.raises(ConfigError, match=r"exchange\.spool .* cannot be used: database is locked"):
            ResultSpool(tmp_path / "s")
        file.close()
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert "hello.worker: must hold no slash" in str(refused.value)
