"""Engines sleep while the trainer trains, at level 0 only; a hub that does not do it never ends the run."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.wire.errors import Reason
from run_output import records

SHORT = {"unreachable_s": 0.5, "sleep_s": 0.2}


async def test_engines_sleep_from_the_last_group_of_a_step_to_its_version(
    mesh, script, make_config, start, tmp_path
) -> None:
    script.sleep_takes_s = 0.05
    async with start(make_config(mesh.services, max_async_level=0, sleep_engines=True)) as (loop, _):
        await loop.train()
    one_step = ["generate", "generate", "sleep", "batch", "trained", "active"]
    assert [kind for kind, _ in script.log] == ["active", *one_step * 4]
    assert [in_flight for kind, in_flight in script.log if kind == "sleep"] == [0] * 4
    assert all(line["time/sleep_engines"] >= 0.05 for line in records(tmp_path))


@pytest.mark.parametrize("reason", [Reason.INTERNAL, Reason.NOT_SUPPORTED, Reason.UNREACHABLE], ids=lambda r: r.name)
async def test_run_goes_on_when_engines_do_not_sleep(
    mesh, script, make_config, start, tmp_path, reason, monkeypatch
) -> None:
    monkeypatch.setattr("meshrl.orchestrator.peers.version_relay.SLEEP_MARGIN_S", 0.2)
    script.sleep_fails = reason
    config = make_config(mesh.services, max_async_level=0, sleep_engines=True, max_steps=2, deadlines=SHORT)
    async with start(config) as (loop, _):
        await loop.train()
    assert sorted(script.batches) == [1, 2]
    assert all("time/sleep_engines" in line for line in records(tmp_path))


async def test_hub_that_does_not_answer_costs_the_deadline(
    mesh, script, make_config, start, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("meshrl.orchestrator.peers.version_relay.SLEEP_MARGIN_S", 0.1)
    script.sleep_takes_s = 60.0
    config = make_config(mesh.services, max_async_level=0, sleep_engines=True, max_steps=1, deadlines=SHORT)
    async with start(config) as (loop, _):
        await loop.train()
    assert sorted(script.batches) == [1]
    assert 0.3 <= records(tmp_path)[0]["time/sleep_engines"] < script.sleep_takes_s


async def test_evaluations_and_sleep_do_not_meet(mesh, script, make_config, start) -> None:
    script.environments = {"echo": 50, "held-out": 3}
    evals = {"interval": 1, "env": [{"id": "held-out"}], "group_size": 1}
    script.reward = lambda request, place: float(place % 2)
    config = make_config(mesh.services, max_async_level=0, sleep_engines=True, max_steps=3, eval=evals)
    async with start(config) as (loop, _):
        await loop.train()
    assert [in_flight for kind, in_flight in script.log if kind == "sleep"] == [0, 0, 0]
    kinds = [kind for kind, _ in script.log]
    assert all(kinds[place + 1] == "batch" for place, kind in enumerate(kinds) if kind == "sleep")


async def test_hub_that_is_away_is_a_warning(mesh, make_config, start, monkeypatch) -> None:
    monkeypatch.setattr("meshrl.orchestrator.peers.version_relay.SLEEP_MARGIN_S", 0.2)
    config = make_config(mesh.services, max_async_level=0, sleep_engines=True, deadlines=SHORT)
    async with start(config) as (loop, _):
        await loop.relay.activate_first(0)
        await mesh.servers["weights"].drain(grace_s=0.0)
        async with asyncio.timeout(60.0):
            await loop.relay.sleep_engines()
