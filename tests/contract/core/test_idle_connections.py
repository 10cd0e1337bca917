"""Connections that bring no request are closed: idle ones, half a handshake, half a header; over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, web
from prometheus_client import CollectorRegistry

from local_ports import free_port
from meshrl.cli.ui import server as ui
from meshrl.client import idle_connections
from meshrl.client.authority import Authority
from meshrl.client.credentials import CredentialFiles, credentials_of
from meshrl.client.idle_connections import IdleConnections
from meshrl.client.trust import Role
from meshrl.core.config.shared import LogConfig
from meshrl.core.rpc.serve import HANDSHAKE_S, IDLE_S, server_options
from meshrl.core.telemetry import exposition
from meshrl.core.telemetry.exposition import observed
from meshrl.core.telemetry.waits import Waits
from meshrl.inference.http.app import InferenceServer

LIMIT_S = 0.5
DEADLINE_S = 60.0
HALF_A_HEADER = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
HALF_A_BODY = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n{"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
HEADERS_WITHOUT_END = b"\0\0\1\1\0\0\0\0\1\x82"


def until_closed(connection: socket.socket, sent: bytes, dribble: bytes = b"") -> float:
    """Seconds until the server has closed a connection over which `sent` came, and a dribble every 0.1 s."""
    began_s = time.monotonic()
    connection.settimeout(0.1)
    with connection:
        connection.sendall(sent)
        while time.monotonic() - began_s < DEADLINE_S:
            try:
                if not connection.recv(65536):
                    break
            except TimeoutError:
                continue_with(connection, dribble)
            except OSError:
                break
    return time.monotonic() - began_s


def continue_with(connection: socket.socket, dribble: bytes) -> None:
    if dribble:
        connection.sendall(dribble)


async def all_closed(connect: Callable[[], socket.socket], *sent: tuple[bytes, bytes]) -> list[float]:
    """After how many seconds each of several connections is closed, all open at once."""
    return await asyncio.gather(
        *(asyncio.to_thread(until_closed, connect(), first, dribble) for first, dribble in sent)
    )


SLOW_HTTP = ((b"", b""), (HALF_A_HEADER, b""), (HALF_A_HEADER, b"x"))


async def test_a_grpc_server_ends_connections_that_bring_no_call(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "credentials", "main")
    authority.issue(tmp_path / "hub", Role.HUB, "hub")
    authority.issue(tmp_path / "caller", Role.AGENT, "caller")
    server = grpc.aio.server(options=server_options(2**20, 5.0, handshake_s=LIMIT_S, idle_s=LIMIT_S))
    port = credentials_of(CredentialFiles.of_folder(tmp_path / "hub")).add_port(server, "127.0.0.1:0")
    await server.start()
    shown = ssl.create_default_context(cafile=str(tmp_path / "caller" / "ca.pem"))
    shown.load_cert_chain(tmp_path / "caller" / "cert.pem", tmp_path / "caller" / "key.pem")
    shown.set_alpn_protocols(["h2"])

    def plain() -> socket.socket:
        return socket.create_connection(("127.0.0.1", port))

    def encrypted() -> socket.socket:
        return shown.wrap_socket(plain(), server_hostname="hub.meshrl")

    before_tls = await all_closed(plain, (b"", b""), (b"\x16\x03\x01\x02", b""), (b"\x16\x03\x01\x40\0", b"\0"))
    parts = (b"", PREFACE, PREFACE + SETTINGS, PREFACE + SETTINGS + HEADERS_WITHOUT_END)
    behind_tls = await asyncio.gather(
        *(asyncio.to_thread(lambda sent: until_closed(encrypted(), sent), each) for each in parts)
    )
    await server.stop(None)
    assert max(before_tls + behind_tls) < DEADLINE_S
    limits = dict(server_options(2**20, 5.0))
    assert limits["grpc.server_handshake_timeout_ms"] == HANDSHAKE_S * 1000
    assert limits["grpc.max_connection_idle_ms"] == IDLE_S * 1000


@asynccontextmanager
async def slow_server() -> AsyncIterator[int]:
    """An HTTP server whose one answer takes three times as long as a connection may be idle."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(3 * LIMIT_S)
        return web.Response(text="done")

    idle = IdleConnections()
    app = web.Application(middlewares=[idle.middleware])
    app.router.add_route("*", "/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with idle.closed(runner):
        yield runner.addresses[0][1]
    await runner.cleanup()


async def test_an_http_server_closes_idle_connections_and_none_that_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_connections, "IDLE_S", LIMIT_S)
    async with slow_server() as port, ClientSession() as session:
        answers = [asyncio.create_task(_text(session, port)) for _ in range(2)]
        slow = (*SLOW_HTTP, (HALF_A_BODY, b""), (HALF_A_BODY, b"x"))
        closed = await all_closed(lambda: socket.create_connection(("127.0.0.1", port)), *slow)
        assert max(closed) < DEADLINE_S
        assert await asyncio.gather(*answers) == ["done", "done"]
        assert await _text(session, port) == "done"  # over a connection that is kept, or a new one


async def test_an_engine_closes_idle_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_connections, "IDLE_S", LIMIT_S)
    engine: Any = SimpleNamespace(max_model_len=96)
    server = InferenceServer(engine, model_name="m", codec=None)
    runner = web.AppRunner(server.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    body = HALF_A_BODY.replace(b"POST /", b"POST /inference/v1/generate")
    async with server.idle.closed(runner):
        connect = partial(socket.create_connection, ("127.0.0.1", runner.addresses[0][1]))
        closed = await all_closed(connect, *SLOW_HTTP, (body, b""), (body, b" "))
    await runner.cleanup()
    assert max(closed) < DEADLINE_S


async def _text(session: ClientSession, port: int) -> str:
    async with session.get(f"http://127.0.0.1:{port}/") as answer:
        return await answer.text()


async def test_the_page_of_runs_closes_idle_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_connections, "IDLE_S", LIMIT_S)
    listens: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(ui.serve([], host="127.0.0.1", port=0, token=None, ready=listens.set_result))
    port = await listens
    closed = await all_closed(lambda: socket.create_connection(("127.0.0.1", port)), *SLOW_HTTP)
    serving.cancel()
    await asyncio.wait({serving})
    assert max(closed) < DEADLINE_S


async def test_the_server_of_metrics_closes_connections_that_bring_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "SCRAPE_S", LIMIT_S)
    port = free_port()
    with observed("hub", Waits(), CollectorRegistry(), LogConfig(metrics_port=port), tmp_path):
        closed = await all_closed(lambda: socket.create_connection(("127.0.0.1", port)), *SLOW_HTTP)
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
            assert "meshrl_loop_lag_seconds" in await answer.text()
    assert max(closed) < DEADLINE_S
