"""A hub calls engines that run already: they follow it until it has gone, and then the next one."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from http_servers import stop_serving
from meshrl.client.credentials import CredentialFiles, credentials_of
from meshrl.client.trust import Role, TrustFile
from meshrl.inference.agent import follower
from meshrl.inference.agent.agent import Membership
from meshrl.inference.agent.follower import HubFollower
from meshrl.inference.engine import EngineStats
from meshrl.inference.http.app import InferenceServer
from meshrl.weights.engine_calls import EngineCaller
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Transport
from weight_mesh import MemoryEngine, Mesh, make_state

DEADLINE_S = 60.0
KEY = "a-key"


class Kept:
    """An engine behind its server, and what follows for it."""

    def __init__(self, engine: MemoryEngine, *, away_s: float) -> None:
        self.engine = engine
        engine.max_model_len, engine.draining, engine.logprobs_mode = 8, False, "processed_logprobs"
        engine.leave_group, engine.stats = self._leave_group, _stats
        self.follower = HubFollower(engine, Membership(), away_s=away_s)
        server = InferenceServer(engine, model_name="m", codec=None, api_key=KEY, follower=self.follower)
        self.runner = web.AppRunner(server.app())
        self.url = ""

    async def _leave_group(self) -> None:
        self.engine.history.append("leave group")

    async def version(self) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            with urllib.request.urlopen(f"{self.url}/version", timeout=60.0) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found

        return await asyncio.to_thread(ask)


def _stats() -> EngineStats:
    counters = dict.fromkeys(
        ("running", "waiting", "generated_tokens", "prefilled_tokens", "shared_prompt_tokens", "finished_requests"), 0
    )
    return EngineStats(slots=1, steps=0, busy_s=0.0, **counters)


@pytest.fixture
async def kept(request: pytest.FixtureRequest) -> AsyncIterator[Kept]:
    """Its parameter is how long it lets a hub be away."""
    kept = Kept(MemoryEngine(make_state(7)), away_s=getattr(request, "param", 0.5))
    await kept.runner.setup()
    site = web.TCPSite(kept.runner, "127.0.0.1", 0)
    await site.start()
    host, port = kept.runner.addresses[0][:2]
    kept.url = f"http://{host}:{port}"
    stop = asyncio.Event()
    running = asyncio.create_task(kept.follower.run(f"{host}:{port}", stop))
    yield kept
    stop.set()
    await asyncio.wait_for(running, DEADLINE_S)
    await stop_serving(kept.runner)


@pytest.fixture
async def second_mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    second = Mesh(tmp_path / "second")
    await second.start_hub()
    yield second
    await second.close()


@asynccontextmanager
async def calling(mesh: Mesh, *urls: str, key: str = KEY, token: str | None = None) -> AsyncIterator[None]:
    stop = asyncio.Event()
    caller = EngineCaller(
        urls, host="127.0.0.1", port=mesh.port, api_key=key, token=token, every_s=0.05,
        registered=lambda: {engine.url for engine in mesh.hub.list_engines("")},
    )  # fmt: skip
    task = asyncio.create_task(caller.run(stop))
    yield
    stop.set()
    await asyncio.wait_for(task, DEADLINE_S)


async def test_what_speaks_no_http_is_called_again(mesh: Mesh, said: list[str]) -> None:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-other\r\n")
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as other:
        url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
        async with calling(mesh, url):
            await mesh.until(lambda: any(f"engine {url} does not answer" in line for line in said), DEADLINE_S)


async def test_an_engine_follows_the_hub_that_calls_and_then_the_next(
    mesh: Mesh, second_mesh: Mesh, kept: Kept, said: list[str]
) -> None:
    """Both runs have a version 1: that of the first is not taken for that of the second."""
    for number, hub in enumerate((mesh, second_mesh)):
        publisher = hub.publisher(Transport.STREAM)
        async with calling(hub, kept.url):
            await hub.until_registered()
            assert [engine.url for engine in hub.hub.list_engines("")] == [kept.url]
            assert not any(engine.routable for engine in hub.hub.list_engines(""))  # it holds another run's weights
            await publisher.publish(1, make_state(number))
            await hub.client().activate_version(run_id="run", version=1, prepare_deadline_s=DEADLINE_S)
            assert kept.engine.holds(make_state(number))
            assert [engine.routable for engine in hub.hub.list_engines("")] == [True]
            answer = await kept.version()
            assert (answer["version"], answer["hub"], answer["hub_is_there"]) == (1, f"127.0.0.1:{hub.port}", True)
            assert any(f"engine {kept.url} follows this hub" in line for line in said)
        await publisher.close()
        await hub.kill_hub()
        await hub.until(lambda: kept.follower.hub is None, DEADLINE_S)  # it gives the hub up after a while
    assert kept.engine.version == 1  # and serves on


async def test_a_hub_does_not_take_an_engine_from_another_that_is_there(
    mesh: Mesh, second_mesh: Mesh, kept: Kept, said: list[str]
) -> None:
    async with calling(mesh, kept.url):
        await mesh.until_registered()
        async with calling(second_mesh, kept.url):
            await mesh.until(lambda: any("whose run is going on" in line for line in said), DEADLINE_S)
            assert kept.follower.hub == f"127.0.0.1:{mesh.port}"
            assert second_mesh.hub.list_engines("") == ()
        await mesh.kill_hub()
        async with calling(second_mesh, kept.url):  # now it may
            await second_mesh.until_registered()
    assert kept.follower.hub == f"127.0.0.1:{second_mesh.port}"


async def test_a_hub_that_was_started_again_is_followed_on(mesh: Mesh, kept: Kept) -> None:
    async with calling(mesh, kept.url):
        await mesh.until_registered()
        await mesh.restart_hub()
        await mesh.until_registered()
        await mesh.publisher(Transport.STREAM).publish(1, make_state(1))
        await mesh.client().activate_version(run_id="run", version=1, prepare_deadline_s=DEADLINE_S)
    assert kept.engine.holds(make_state(1))


@pytest.mark.parametrize("kept", [600.0], indirect=True)
async def test_a_hub_at_the_same_address_that_wants_another_token_is_followed_at_once(
    mesh: Mesh, kept: Kept, tmp_path: Path
) -> None:
    """It was started again, or is that of the next run: the token of the one before counts no more."""
    trust = TrustFile(tmp_path / "credentials" / "trust.sqlite")
    trust.create()
    mesh.credentials = credentials_of(CredentialFiles(trust=trust.path))
    for _ in range(2):
        await mesh.kill_hub()
        token = trust.add_token(Role.AGENT, id_="called-engine")
        await mesh.start_hub()
        async with calling(mesh, kept.url, token=token):
            await mesh.until_registered()


async def test_who_cannot_follow_is_named_once(mesh: Mesh, kept: Kept, warned: list[str]) -> None:
    async def version(_request: web.Request) -> web.Response:
        return web.json_response({"version": "0.11"})

    other = web.Application()
    other.router.add_get("/version", version)
    runner = web.AppRunner(other)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with calling(mesh, url, kept.url, "http://127.0.0.1:1", key="wrong"):
        await mesh.until(lambda: len([line for line in warned if line.startswith("engine ")]) >= 3, DEADLINE_S)
        await asyncio.sleep(0.2)  # several rounds
    said = [line for line in warned if line.startswith("engine ")]
    assert len(said) == 3
    assert any(f"{url} gets no versions: it has no POST /follow_hub" in line for line in said)
    assert any("refused to follow (401): the Authorization header must carry" in line for line in said)
    assert any("http://127.0.0.1:1 does not answer" in line for line in said)
    await stop_serving(runner)


async def test_a_hub_that_the_engine_does_not_reach_is_refused(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "REACH_S", 0.5)
    with pytest.raises(MeshError) as refused:
        await kept.follower.follow("127.0.0.1:1", kept.url)
    assert refused.value.reason is Reason.UNREACHABLE
    assert kept.follower.hub is None
