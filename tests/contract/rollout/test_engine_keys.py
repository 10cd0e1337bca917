"""Engines that want a key: a service without it is refused with a sentence, before any rollout is lost."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.core.config import ConfigError
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Rollout, RolloutFailure

KEY = "the-engines-key"
REFUSED = "answers 401 to calls {}; put the engines' key into the variable MESH_ENGINE_KEY"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESH_ENGINE_KEY", raising=False)


def keyed(**client) -> dict:
    return {"client": {"api_key_var": "MESH_ENGINE_KEY", **client}}


async def refused(mesh, request) -> str:
    """The words with which a group is refused."""
    with pytest.raises(MeshError) as refusal:
        await mesh.collect(request)
    return str(refusal.value)


async def health_is(mesh, engine, status: int, *, healthy: bool) -> None:
    """Gives the engine this health, and waits until the service has seen it."""
    engine.health = status
    async with asyncio.timeout(30.0):
        while (await mesh.client.get_status()).engines[0].healthy is not healthy:  # noqa: ASYNC110  # another program
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_service_without_the_key_of_its_engines_does_not_start(start_mesh, engine, monkeypatch, workers):
    engine.key = KEY
    with pytest.raises(ConfigError, match=REFUSED.format("without a key")):
        await start_mesh([engine], workers=workers, **keyed())
    monkeypatch.setenv("MESH_ENGINE_KEY", "another-key")
    with pytest.raises(ConfigError, match=REFUSED.format("with the key of this program")):
        await start_mesh([engine], workers=workers, **keyed())


async def test_a_service_without_the_key_of_the_hubs_engines_does_not_start_also_while_they_have_no_version(
    start_mesh, engine, hub
):
    engine.key = KEY
    hub.engines = [(engine.url, "", False)]
    with pytest.raises(ConfigError, match=REFUSED.format("without a key")):
        await start_mesh([], weights=hub.address, **keyed(base_url=[]))


@pytest.mark.parametrize("workers", [0, 1])
async def test_it_plays_with_the_key_from_a_variable_or_a_file(start_mesh, make_group, engine, tmp_path, workers):
    engine.key = KEY
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "key").chmod(0o600)
    by_file = await start_mesh([engine], workers=workers, client={"api_key_file": str(tmp_path / "key")})
    by_variable = await start_mesh([engine], workers=workers, client={"api_key_var": "MESH_WORKERS_KEY"})
    for mesh in (by_file, by_variable):
        rollout, _ = await mesh.collect(make_group(deadline_s=120.0))
        assert isinstance(rollout, Rollout)


@pytest.mark.parametrize("bound", [{}, {"min_version": 0}])
async def test_groups_are_refused_and_none_of_their_rollouts_is_lost_while_every_engine_refuses_the_key(
    start_mesh, make_group, engine, bound
):
    mesh = await start_mesh([engine], **keyed())
    await health_is(mesh, engine, 503, healthy=False)  # it is started again, with a key
    engine.key, engine.health = KEY, 200
    for _ in range(3):
        with pytest.raises(MeshError, match=REFUSED.format("without a key")) as refusal:
            await mesh.collect(make_group(group_size=8, **bound))
        assert refusal.value.reason is Reason.VERSION_NOT_AVAILABLE
    assert engine.requests == []
    engine.key = ""
    await health_is(mesh, engine, 200, healthy=True)
    assert (await mesh.collect(make_group(**bound)))[-1].finished == 1


async def test_a_group_is_refused_with_what_is_wrong_with_each_engine_while_none_answers(
    start_mesh, make_group, engine
):
    mesh = await start_mesh([engine])
    await health_is(mesh, engine, 503, healthy=False)
    with pytest.raises(MeshError, match=rf"no engine is reachable \({engine.url} answers 503") as refusal:
        await mesh.collect(make_group(min_version=0, group_size=8))
    assert refusal.value.reason is Reason.VERSION_NOT_AVAILABLE
    await engine.stop()
    async with asyncio.timeout(30.0):
        while "does not answer" not in (await refused(mesh, make_group(min_version=0))):
            pass
    assert engine.requests == []


async def test_a_call_that_is_refused_for_its_key_names_that_and_no_further_group_is_taken(
    start_mesh, make_group, engine
):
    mesh = await start_mesh([engine], **keyed(failover_s=0.3))
    engine.on_call = lambda request, body: setattr(engine, "key", KEY)
    await mesh.collect(make_group())
    failure, summary = await mesh.collect(make_group())
    assert isinstance(failure, RolloutFailure)
    assert failure.reason == Reason.ENGINE_FAILED.name
    assert REFUSED.format("without a key") in failure.message
    assert summary.failed == 1
    with pytest.raises(MeshError, match=REFUSED.format("without a key")):
        await mesh.collect(make_group())
