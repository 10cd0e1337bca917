"""Clients behind an HTTP proxy, which they are told of by `grpc_proxy`."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from grpc_servers import served
from meshrl.client import WeightSyncClient
from meshrl.v1 import weights_pb2_grpc
from meshrl.wire import frames


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.mark.parametrize("variable", ["grpc_proxy", "http_proxy"])
async def test_calls_go_through_the_proxy_of_grpc_and_not_that_of_the_web(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    asked: list[str] = []

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.decode().splitlines()[0])
        host, port = asked[-1].split()[1].split(":")
        there, back = await asyncio.open_connection(host, int(port)), (reader, writer)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(pipe(back[0], there[1]), pipe(there[0], back[1]))

    adder, servicer = weights_pb2_grpc.add_WeightSyncServicer_to_server, weights_pb2_grpc.WeightSyncServicer()
    async with served(frames.SERVICE, adder, servicer) as address:
        proxy = await asyncio.start_server(connect, "127.0.0.1", 0)
        for other in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        async with WeightSyncClient(address) as client:
            await client.wait_until_serving(60.0)
        proxy.close()
    assert asked == ([f"CONNECT {address} HTTP/1.1"] if variable == "grpc_proxy" else [])
