"""Several rollout services in one run: groups go to those that host their environment, and survive the loss of one."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from local_ports import free_port
from meshrl.core.clock import Clock
from meshrl.core.rpc.serve import GrpcServer
from meshrl.sampling import pool as pool_module
from meshrl.sampling.hosts import HostState
from meshrl.sampling.pool import RolloutPool
from meshrl.sampling.retry import RunError
from meshrl.sampling.sampler import RolloutSampler
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.program_state import WaitState
from meshrl.wire.types import RolloutRequest, Sampling
from polling import until
from run_output import assert_exact
from scripted_services import RolloutServicer, Script, start_server, ticket

PATIENT = {"unreachable_s": 60.0}


@dataclass
class Host:
    """One more rollout service of a scripted mesh, which plays by the mesh's script and can be killed."""

    script: Script
    environments: dict[str, int]
    port: int = field(default_factory=free_port)
    overloaded: bool = False
    asked: list[RolloutRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    played: Counter[str] = field(default_factory=Counter)
    gate: asyncio.Event | None = None
    """Closed, every group of this service stands still after its first rollout."""
    held: int = 0
    server: GrpcServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = await start_server(HostServicer(self), self.port)

    async def kill(self) -> None:
        assert self.server is not None
        await self.server.drain(grace_s=0.0)


class HostServicer(RolloutServicer):
    def __init__(self, host: Host) -> None:
        super().__init__(Script(environments=host.environments))
        self.host = host

    async def CancelRollouts(self, request, context):  # noqa: N802 - the name is gRPC's
        self.host.cancelled += request.group_ids
        return await super().CancelRollouts(request, context)

    async def RunRollouts(self, message, context):  # noqa: N802 - the name is gRPC's
        host, common = self.host, self.host.script
        if host.overloaded:
            common.refused["OVERLOADED"] += 1
            raise MeshError(Reason.OVERLOADED, "scripted", retry_after_s=60.0)
        host.asked.append(convert.from_proto(RolloutRequest, message))
        self.script.engine_version, self.script.rollout_s = common.engine_version, common.rollout_s
        async for event in super().RunRollouts(message, context):
            yield event
            if event.WhichOneof("event") == "rollout":
                host.played[message.environment] += 1
                if host.gate is not None:
                    host.held += 1
                    await host.gate.wait()


@asynccontextmanager
async def hosts(*given: Host) -> AsyncIterator[list[str]]:
    for host in given:
        await host.start()
    try:
        yield [host.address for host in given]
    finally:
        for host in given:
            await host.kill()


def services_with(mesh, addresses: list[str]):
    return mesh.services.model_copy(update={"rollout": addresses})


async def test_a_service_that_is_killed_loses_nothing_and_is_used_again_once_it_is_back(
    mesh, script, make_config, start, tmp_path, said
) -> None:
    script.step_holds = {4: asyncio.Event(), 9: asyncio.Event()}
    stays, dies = Host(script, {"echo": 50}), Host(script, {"echo": 50})
    async with hosts(stays, dies) as addresses:
        config = make_config(services_with(mesh, addresses), max_steps=64, max_async_level=2, deadlines=PATIENT)
        async with start(config) as (loop, journal):  # steps enough that the one that is back has its turn
            running = asyncio.create_task(loop.train())
            await until(lambda: script.trained_version == 3 and dies.asked and stays.asked)
            dies.gate = asyncio.Event()
            script.step_holds[4].set()
            await until(lambda: dies.held)
            await dies.kill()
            dies.gate = None
            await until(lambda: script.trained_version == 8)
            asked = len(dies.asked)
            await dies.start()
            await until(lambda: any("serves again" in line for line in said))
            script.step_holds[9].set()
            await asyncio.wait_for(running, 60.0)
            journal.end()
        assert len(dies.asked) > asked, "the service that is back plays again"
        report = assert_exact(tmp_path, 64)
        assert report.counts["trained", ""] == 64 * 8
        assert not [reason for state, reason in report.counts if state == "failed"], report.table()
    assert any("rollouts to come, which are sampled again" in line for line in said)
    assert any(f"the rollout service at {dies.address} is draining" in line for line in said)


async def test_what_a_step_waits_for_is_said_by_name(mesh, script, make_config, start) -> None:
    quick, slow = Host(script, {"echo": 50}), Host(script, {"slow": 20}, gate=asyncio.Event())
    train = {"env": [{"id": "echo"}, {"id": "slow"}]}
    async with hosts(quick, slow) as addresses:
        config = make_config(services_with(mesh, addresses), max_steps=1, train=train, deadlines=PATIENT)
        async with start(config) as (loop, _):
            running = asyncio.create_task(loop.train())
            words = f"of 'slow' at {slow.address}, the oldest for"

            def found() -> list[WaitState]:
                return [wait for wait in loop.run.waits.look(0.0) if wait.name == "groups" and words in wait.what]

            await until(lambda: found())
            assert found()[0].on == tuple(addresses)
            slow.gate.set()
            await asyncio.wait_for(running, 60.0)


async def test_what_came_back_of_a_group_stays_when_its_service_is_lost(script) -> None:
    script.engine_version = 0
    first, second = Host(script, {"echo": 50}, gate=asyncio.Event()), Host(script, {"echo": 50})
    async with hosts(first, second) as addresses, pooled(addresses) as pool:
        sampler = sampler_of(pool)
        pool.table.hosts[1].refuses_until_s = Clock().now() + 60.0  # so that the first is asked
        sampling = asyncio.create_task(sampler.sample(ticket(size=4, seed=5), sampling=Sampling()))
        await until(lambda: pool.places and pool.places["g"].left == 3)
        pool.table.hosts[1].refuses_until_s = 0.0
        await first.kill()
        group = await asyncio.wait_for(sampling, 60.0)
    assert [request.group_size for request in (*first.asked, *second.asked)] == [4, 3]
    assert first.asked[0].sampling.seed == 5
    assert second.asked[0].sampling.seed not in range(5, 9), "the same seeds would sample the same rollouts again"
    assert len({rollout.rollout_id for rollout in group.rollouts}) == 4
    assert (group.lost, group.failures, group.cut_short) == (0, [], "")


async def test_a_group_goes_on_as_soon_as_its_service_is_seen_to_be_back(script) -> None:
    script.engine_version = 0
    waits = asyncio.Event()

    async def sleep(seconds: float) -> None:  # the group's own waits never end, those between two looks do
        if seconds not in (pool_module.WATCH_S, pool_module.AWAY_WATCH_S):
            waits.set()
            await asyncio.Event().wait()
        await asyncio.sleep(seconds)

    only = Host(script, {"echo": 50})
    async with hosts(only) as addresses, pooled(addresses, clock=Clock(sleep=sleep)) as pool:
        await only.kill()
        sampler = sampler_of(pool)
        sampling = asyncio.create_task(sampler.sample(ticket(size=2), sampling=Sampling()))
        await asyncio.wait_for(waits.wait(), 60.0)
        await only.start()
        group = await asyncio.wait_for(sampling, 60.0)
    assert (len(group.rollouts), group.lost, group.cut_short) == (2, 0, "")


async def test_a_service_that_stays_away_ends_the_run_with_the_key_of_its_patience(script) -> None:
    script.engine_version = 0
    only = Host(script, {"echo": 50})
    async with hosts(only) as addresses, pooled(addresses, unreachable_s=0.2) as pool:
        await only.kill()
        with pytest.raises(RunError, match=r"stayed away for 0\.2 s \(deadlines\.unreachable_s\): "):
            await asyncio.wait_for(sampler_of(pool).sample(ticket(size=2), sampling=Sampling()), 60.0)


async def test_a_service_that_is_away_is_looked_at_more_often(script, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(seconds)

    only = Host(script, {"echo": 50})
    async with hosts(only) as addresses, pooled(addresses, clock=Clock(sleep=sleep)) as pool:
        await until(lambda: slept)
        assert slept[0] == pool_module.WATCH_S
        monkeypatch.setattr(pool_module, "LOOK_DEADLINE_S", 0.2)
        await only.kill()
        await until(lambda: pool.table.hosts[0].state is not HostState.SERVING)
        slept.clear()
        await until(lambda: len(slept) >= 3)
        assert max(slept) <= 0.25


async def test_groups_of_a_service_that_says_it_does_not_serve_move_though_their_streams_stand(script) -> None:
    script.engine_version = 0
    stuck, other = Host(script, {"echo": 50}, gate=asyncio.Event()), Host(script, {"echo": 50})
    async with hosts(stuck, other) as addresses, pooled(addresses, unreachable_s=0.2) as pool:
        pool.table.hosts[1].refuses_until_s = Clock().now() + 60.0
        sampling = asyncio.create_task(sampler_of(pool).sample(ticket(size=3), sampling=Sampling()))
        await until(lambda: stuck.held)
        pool.table.hosts[1].refuses_until_s = 0.0
        assert stuck.server is not None
        stuck.server.set_not_serving()
        group = await asyncio.wait_for(sampling, 60.0)
        assert pool.table.hosts[0].why == "its health says NOT_SERVING"
    assert [request.group_size for request in other.asked] == [2]
    assert (len(group.rollouts), group.cut_short) == (3, "")


async def test_environments_of_one_service_wait_for_it_while_the_others_go_on(
    mesh, script, make_config, start, tmp_path, said
) -> None:
    common, own = Host(script, {"echo": 50}), Host(script, {"own": 20})
    train = {"env": [{"id": "echo"}, {"id": "own", "group_size": 2}]}
    async with hosts(common, own) as addresses:
        config = make_config(services_with(mesh, addresses), max_steps=8, train=train, deadlines=PATIENT)
        async with start(config) as (loop, journal):
            running = asyncio.create_task(loop.train())
            await until(lambda: script.trained_version >= 2)
            await own.kill()
            await until(lambda: any("nobody else serves own: waiting for up to 60 s" in line for line in said))
            await own.start()
            await asyncio.wait_for(running, 60.0)
            journal.end()
        report = assert_exact(tmp_path, 8)
    assert {request.environment for request in common.asked} == {"echo"}
    assert {(request.environment, request.group_size <= 2) for request in own.asked} == {("own", True)}
    assert not [reason for state, reason in report.counts if state == "failed"], report.table()


async def test_a_service_that_refuses_is_passed_over(mesh, script, make_config, start) -> None:
    full, free = Host(script, {"echo": 50}, overloaded=True), Host(script, {"echo": 50})
    async with hosts(full, free) as addresses:
        config = make_config(services_with(mesh, addresses), max_steps=3, deadlines=PATIENT)
        async with start(config) as (loop, _):
            await asyncio.wait_for(loop.train(), 50.0)
    assert script.trained_version == 3
    assert (full.asked, len(free.asked)) == ([], 6)
    assert 1 <= script.refused["OVERLOADED"] <= 4, "those that were asked before its first answer"


async def test_groups_are_cancelled_where_they_are_played(script) -> None:
    script.engine_version = 0
    left, right = (Host(script, {name: 50}, gate=asyncio.Event()) for name in ("left", "right"))
    async with hosts(left, right) as addresses, pooled(addresses) as pool:
        sampler = sampler_of(pool)
        groups = [
            asyncio.create_task(sampler.sample(ticket(name, size=2, environment=name), sampling=Sampling()))
            for name in ("left", "right")
        ]
        await until(lambda: left.played and right.played)
        assert await pool.cancel(["left", "right", "of nobody"]) == 2
        assert (left.cancelled, right.cancelled) == (["left"], ["right"])
        for host in (left, right):
            host.gate.set()
        ended = await asyncio.wait_for(asyncio.gather(*groups), 60.0)
    assert [(len(group.rollouts), group.cancelled) for group in ended] == [(1, 1), (1, 1)]


async def test_an_environment_that_nobody_hosts_is_an_error_that_names_who_hosts_what(
    mesh, script, make_config, start
) -> None:
    train = {"env": [{"id": "echo"}, {"id": "third"}]}
    async with hosts(Host(script, {"echo": 50}), Host(script, {"own": 20})) as (one, two):
        config = make_config(services_with(mesh, [one, two]), train=train)
        expected = (
            f"names 'third', which no rollout service hosts; {one} has echo; {two} has own; host it at one of them"
        )
        with pytest.raises(RunError, match=expected):
            async with start(config):
                pass


async def test_one_name_for_two_environments_is_an_error(mesh, script, make_config, start) -> None:
    async with hosts(Host(script, {"echo": 50}), Host(script, {"echo": 20})) as (one, two):
        with pytest.raises(RunError, match=f"'echo' has 50 tasks at {one} and 20 tasks at {two}; host the same"):
            async with start(make_config(services_with(mesh, [one, two]))):
                pass


async def test_a_run_begins_without_a_service_that_it_does_not_need(
    mesh, script, make_config, start, monkeypatch, said
) -> None:
    monkeypatch.setattr(pool_module, "START_GRACE_S", 0.1)
    here, absent = Host(script, {"echo": 50}), Host(script, {"echo": 50})
    async with hosts(here, absent) as addresses:
        await absent.kill()
        config = make_config(services_with(mesh, addresses), max_steps=2, deadlines=PATIENT)
        async with start(config) as (loop, _):
            await asyncio.wait_for(loop.train(), 60.0)
        await absent.start()
    assert len(here.asked) == 4
    assert any(f"begins without the rollout service at {absent.address}" in line for line in said)


async def test_a_service_that_comes_back_with_other_tasks_is_not_used_and_one_with_new_ones_is(script, said) -> None:
    stays, changes = Host(script, {"echo": 50}), Host(script, {"echo": 50})
    async with hosts(stays, changes) as addresses, pooled(addresses) as pool:
        await changes.kill()
        await until(lambda: pool.table.hosts[1].state is HostState.AWAY)
        changes.environments = {"echo": 20}
        await changes.start()
        await until(
            lambda: any(f"at {changes.address} is not used: environment 'echo' has 50 tasks" in line for line in said)
        )
        await changes.kill()
        changes.environments = {"echo": 50, "new": 5}
        await changes.start()
        await until(lambda: pool.table.hosts[1].state is HostState.SERVING)
        assert [host.address for host in pool.table.hosting("new")] == [changes.address]


@asynccontextmanager
async def pooled(
    addresses: list[str], unreachable_s: float = 60.0, clock: Clock | None = None
) -> AsyncIterator[RolloutPool]:
    pool = RolloutPool(addresses, unreachable_s=unreachable_s, clock=clock)
    try:
        await pool.gather((), startup_s=60.0)
        async with pool.watching():
            yield pool
    finally:
        await pool.close()


def sampler_of(pool: RolloutPool) -> RolloutSampler:
    return RolloutSampler(pool, group_s=60.0, retry_s=60.0, clock=Clock())
