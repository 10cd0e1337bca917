"""Connections of the in-process harness to the interception server of its process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

LONG_S = 3600.0


@asynccontextmanager
async def watched_connects(monkeypatch: pytest.MonkeyPatch, port: int, before=None) -> AsyncIterator[list[int]]:
    """Collects a 1 for each connection to `port` of this event loop; `before` is awaited while one is being made."""
    loop, made = asyncio.get_running_loop(), []
    connect = loop.sock_connect

    async def watched(sock, address):
        if address[1] == port:
            made.append(1)
            if before is not None:
                await before()
        return await connect(sock, address)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "sock_connect", watched)
        yield made


def interception_port(mesh) -> int:
    (player,) = mesh.runner.environments.values()
    return player.hosted.env._interception._inner.port


async def test_rollouts_one_after_another_share_a_connection(start_mesh, engine, make_group, monkeypatch):
    mesh = await start_mesh([engine])
    async with watched_connects(monkeypatch, interception_port(mesh)) as made:
        for _ in range(6):
            assert len(await mesh.played(make_group())) == 1
    assert len(made) == 1


async def test_rollouts_at_the_same_time_need_a_connection_each_and_no_more(
    start_mesh, engine, make_group, monkeypatch
):
    mesh = await start_mesh([engine])
    async with watched_connects(monkeypatch, interception_port(mesh)) as made:
        for _ in range(3):
            assert len(await mesh.played(make_group(group_size=4))) == 4
    assert 1 <= len(made) <= 4


async def test_an_event_loop_that_is_busy_for_a_minute_fails_no_rollout(start_mesh, engine, make_group, monkeypatch):
    mesh = await start_mesh([engine])
    loop = asyncio.get_running_loop()
    clock = loop.time

    async def busy_for_a_minute() -> None:
        monkeypatch.setattr(loop, "time", lambda: clock() + 60.0)
        for _ in range(3):  # whatever timer is due by now fires
            await asyncio.sleep(0)

    async with watched_connects(monkeypatch, interception_port(mesh), busy_for_a_minute) as made:
        assert len(await mesh.played(make_group(deadline_s=LONG_S))) == 1
    assert len(made) == 1
