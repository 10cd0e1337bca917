"""Engines that the weight hub names: they join and leave while rollouts run, and the hub may be away."""

from __future__ import annotations

import asyncio
import time

from meshrl.rollout.config import RolloutConfig
from meshrl.wire.errors import Reason
from meshrl.wire.types import Rollout
from polling import until

PATIENCE_S = 60.0


async def engines_are(mesh, *urls: str) -> None:
    """Waits until just these engines are known to be up."""
    give_up_s = time.monotonic() + PATIENCE_S
    known: set[str] = set()
    while time.monotonic() < give_up_s:
        known = {engine.url for engine in (await mesh.client.get_status()).engines if engine.healthy}
        if known == set(urls):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"the healthy engines are {known}, not {urls}")


def discovering(hub, **client) -> dict:
    return {"weights": hub.address, "client": {"base_url": [], "failover_s": 5.0, **client}}


async def test_an_engine_that_joins_gets_calls_and_one_that_leaves_gets_no_more(
    start_mesh, make_group, engine, second, hub
):
    hub.name(engine)
    mesh = await start_mesh([], **discovering(hub))
    await mesh.collect(make_group(group_size=2))
    assert (len(engine.requests), len(second.requests)) == (2, 0)
    hub.name(engine, second)
    await engines_are(mesh, engine.url, second.url)
    gates = engine.hold(), second.hold()  # until all calls are there, so that none is chosen by an answer
    running = asyncio.create_task(mesh.collect(make_group(group_size=8, deadline_s=60.0)))
    await until(lambda: len(engine.requests) + len(second.requests) == 10)
    for gate in gates:
        gate.set()
    await running
    assert (len(engine.requests), len(second.requests)) == (6, 4)
    hub.name(second)
    await engines_are(mesh, second.url)
    await mesh.collect(make_group(group_size=3))
    assert (len(engine.requests), len(second.requests)) == (6, 7)


async def test_calls_in_flight_on_an_engine_that_leaves_the_list_are_finished_there(
    start_mesh, make_group, engine, second, hub
):
    hub.name(engine)
    mesh = await start_mesh([], **discovering(hub))
    gate = engine.hold()
    running = asyncio.create_task(mesh.collect(make_group(group_size=2, deadline_s=60.0)))
    await until(lambda: len(engine.requests) == 2)
    hub.name(second)
    await engines_are(mesh, second.url)
    gate.set()
    *rollouts, summary = await running
    assert summary.finished == 2
    assert all(isinstance(rollout, Rollout) for rollout in rollouts)
    assert (len(engine.requests), len(second.requests)) == (2, 0)


async def test_a_hub_that_is_away_leaves_the_last_list_in_force(start_mesh, make_group, engine, second, hub):
    hub.name(engine)
    mesh = await start_mesh([], **discovering(hub, probe_deadline_s=0.3))
    await hub.stop()
    await asyncio.sleep(0.5)  # several looks
    rollout, _ = await mesh.collect(make_group())
    assert isinstance(rollout, Rollout)
    hub.name(second)
    await hub.start()
    await engines_are(mesh, second.url)


async def test_a_rollout_waits_for_the_first_engine(start_mesh, make_group, engine, hub):
    mesh = await start_mesh([], **discovering(hub))
    running = asyncio.create_task(mesh.collect(make_group()))
    await asyncio.sleep(0.2)
    assert not running.done()
    hub.name(engine)
    rollout, _ = await asyncio.wait_for(running, PATIENCE_S)
    assert isinstance(rollout, Rollout)


async def test_an_engine_that_is_not_routable_or_not_healthy_gets_no_calls(
    start_mesh, make_group, engine, second, hub, make_engine
):
    third = await make_engine().start()
    hub.engines = [(engine.url, "", False), (second.url, "", True), (third.url, "", True)]
    third.health = 503
    mesh = await start_mesh([], **discovering(hub))
    await mesh.collect(make_group(group_size=3))
    assert (len(engine.requests), len(second.requests), len(third.requests)) == (0, 3, 0)
    third.health = 200
    await engines_are(mesh, second.url, third.url)
    await third.stop()


async def test_versions_and_pools_of_discovered_engines_count(start_mesh, make_group, engine, second, hub):
    engine.version, second.version = 3, 4
    hub.engines = [(engine.url, "small", True), (second.url, "big", True)]
    mesh = await start_mesh([], **discovering(hub))
    await mesh.collect(make_group(group_size=2, min_version=4))
    await mesh.collect(make_group(group_size=2, exact_version=3))
    await mesh.collect(make_group(group_size=2, engine_pool="big"))
    assert (len(engine.requests), len(second.requests)) == (2, 4)
    assert (await mesh.refused(make_group(engine_pool="huge"))).reason is Reason.INVALID_REQUEST
    hub.engines = [(engine.url, "small", True)]
    await engines_are(mesh, engine.url)
    error = await mesh.refused(make_group(engine_pool="big", min_version=4))
    assert error.reason is Reason.VERSION_NOT_AVAILABLE  # there was such a pool: others may come


async def test_looking_is_cheap(start_mesh, engine, hub):
    hub.name(engine)
    await start_mesh([], **discovering(hub, probe_interval_s=0.2))
    began_s, before = time.monotonic(), hub.asked
    await until(lambda: hub.asked >= before + 4)
    assert time.monotonic() - began_s > 3 * 0.2 * 0.9  # one call a look, however many engines


def test_the_default_url_is_no_engine_beside_a_hub():
    env = [{"id": "a"}]
    assert RolloutConfig(env=env).engine_urls == ("http://127.0.0.1:8000",)
    assert RolloutConfig(env=env, weights="hub:50053").engine_urls == ()
    given = {"base_url": ["http://a:1"]}
    assert RolloutConfig(env=env, weights="hub:50053", client=given).engine_urls == ("http://a:1",)
