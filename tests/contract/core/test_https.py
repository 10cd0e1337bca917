"""An engine's HTTP over TLS: by the run's certificates, renewed while it serves, verified by those who call it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from http_servers import stop_serving
from meshrl.client.authority import Authority
from meshrl.client.credentials import CredentialFiles
from meshrl.client.names import own_hosts
from meshrl.client.trust import Role
from meshrl.core.credentials.https import client_context, kept_fresh, scheme, server_context
from meshrl.weights.engine_calls import EngineCaller

DEADLINE_S = 60.0


def variables(authority: Authority, role: Role, name: str) -> dict[str, str]:
    """What a member of the run finds in its environment."""
    authority.issue(authority.folder / name, role, name, hosts=own_hosts())
    return CredentialFiles.of_folder(authority.folder / name).variables()


@asynccontextmanager
async def engine(environ: dict[str, str], app: web.Application) -> AsyncIterator[int]:
    """Serves as `inference` does; yields the port."""
    context = server_context(environ)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        async with kept_fresh(context, environ):
            yield runner.addresses[0][1]
    finally:
        await stop_serving(runner)


async def certificate_shown(port: int, context: ssl.SSLContext) -> bytes:
    """The certificate that the server shows on a new connection."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return shown


async def test_an_engine_is_verified_and_takes_a_renewed_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.create(tmp_path / "run", "main")
    theirs, ours = variables(authority, Role.AGENT, "e1"), variables(authority, Role.ROLLOUT, "r1")
    other = variables(Authority.create(tmp_path / "other", "other"), Role.ROLLOUT, "r1")
    assert (scheme(theirs), scheme({})) == ("https", "http")
    assert client_context({}) is None
    trusted = client_context(ours)
    assert trusted is not None
    followed = []

    async def follow(request: web.Request) -> web.Response:
        followed.append(await request.json())
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/follow_hub", follow)
    async with engine(theirs, app) as port:
        url = f"https://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as session:
            for wrong in (client_context(other), True):
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await session.post(f"{url}/follow_hub", json={}, ssl=wrong)
            answer = await session.post(f"{url}/follow_hub", json={"from": "a client"}, ssl=trusted)
            assert answer.status == 200
        for variable, value in ours.items():
            monkeypatch.setenv(variable, value)
        caller = EngineCaller([url], host="127.0.0.1", port=7, api_key=None, token="t", registered=lambda: ())
        assert await asyncio.to_thread(caller._ask, url) == ""
        assert followed == [{"from": "a client"}, {"host": "127.0.0.1", "port": 7, "token": "t", "url": url}]
        before = await certificate_shown(port, trusted)
        variables(authority, Role.AGENT, "e1")
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if await certificate_shown(port, trusted) != before:
                    break
                await asyncio.sleep(0.1)
