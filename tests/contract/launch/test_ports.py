"""Ports of a run: free, different, and nobody else's while the run lasts."""

import asyncio
import subprocess
import sys

import grpc
import pytest
from aiohttp import web

from meshrl.core.config import ConfigError
from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.serve import GrpcServer
from meshrl.launch.ports import HOLDS, FreePorts

ASK_FOR_PORTS = """
from meshrl.launch.ports import FreePorts
with FreePorts() as free_port:
    print(*[free_port("127.0.0.1") for _ in range(500)], flush=True)
    input()
"""


def test_ports_are_free_and_different() -> None:
    with FreePorts() as free_port:
        ports = [free_port("127.0.0.1") for _ in range(50)]
    assert len(set(ports)) == 50
    assert min(ports) > 0


@pytest.mark.skipif(not HOLDS, reason="only Linux holds ports")
def test_runs_that_start_at_once_never_get_the_same_port() -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", ASK_FOR_PORTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    given = []
    for process in runs:
        assert process.stdout is not None
        given.append(set(process.stdout.readline().split()))
    for process in runs:
        process.communicate("\n", timeout=60.0)
    assert [len(ports) for ports in given] == [500, 500]
    assert not given[0] & given[1]


async def test_servers_listen_on_the_ports_that_were_held_for_them_and_again_after_a_restart() -> None:
    with FreePorts() as free_port:
        grpc_port, http_port = free_port("127.0.0.1"), free_port("127.0.0.1")
        for _ in range(2):
            server = GrpcServer(ServerConfig(port=grpc_port))
            assert await server.start() == grpc_port
            async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                await asyncio.wait_for(channel.channel_ready(), 60.0)
            runner = web.AppRunner(web.Application())
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", http_port).start()
            _, writer = await asyncio.open_connection("127.0.0.1", http_port)
            writer.close()
            await writer.wait_closed()
            await runner.cleanup()
            await server.drain(0.0)


def test_host_of_another_machine_is_refused() -> None:
    with FreePorts() as free_port, pytest.raises(ConfigError, match=r"'192.0.2.1': no port can be bound there"):
        free_port("192.0.2.1")
