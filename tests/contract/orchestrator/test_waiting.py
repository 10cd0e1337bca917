"""Before the loop: who is waited for is said at once, and a server that can never be ready is an error at once."""

import asyncio
import time

import grpc
import pytest

from local_ports import free_port
from meshrl.core.telemetry.waits import Waits
from meshrl.orchestrator.peers.connect import connect, wait_for_services
from meshrl.sampling.retry import RunError
from polling import until


async def test_a_server_without_health_is_an_error_at_once(mesh, make_config) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    services = mesh.services.model_copy(update={"trainer": f"127.0.0.1:{port}", "rollout": "127.0.0.1:1"})
    config = make_config(services, deadlines={"startup_s": 600.0})
    clients = connect(config.services, unreachable_s=config.deadlines.unreachable_s)
    try:
        with pytest.raises(RunError, match=rf"trainer at 127.0.0.1:{port}.*grpc.health.v1.Health.*add it"):
            await asyncio.wait_for(wait_for_services(config, clients, Waits()), 60.0)
    finally:
        await clients.close()
        await server.stop(None)


async def test_who_is_awaited_and_why_is_said_while_it_is_awaited(mesh, make_config, said) -> None:
    address = f"127.0.0.1:{free_port()}"
    config = make_config(mesh.services.model_copy(update={"trainer": address}), deadlines={"startup_s": 600.0})
    clients = connect(config.services, unreachable_s=config.deadlines.unreachable_s)
    waiting = asyncio.create_task(wait_for_services(config, clients, Waits()))
    try:
        async with asyncio.timeout(60.0):
            while not any(address in line for line in said):
                assert not waiting.done()
                await asyncio.sleep(0.05)
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await clients.close()
    (line,) = (line for line in said if address in line)
    assert line.startswith(f"waiting for the trainer at {address}, for up to 600 s: ")
    assert "refused" in line


async def test_a_server_that_is_not_ready_yet_is_waited_for(mesh, make_config, said) -> None:
    mesh.servers["trainer"].set_not_serving()
    config = make_config(mesh.services, deadlines={"startup_s": 60.0})
    clients = connect(config.services, unreachable_s=config.deadlines.unreachable_s)
    waiting = asyncio.create_task(wait_for_services(config, clients, Waits()))
    await until(lambda: any("NOT_SERVING" in line for line in said))
    mesh.servers["trainer"].set_serving()
    assert (await asyncio.wait_for(waiting, 60.0)).trainer.model == "scripted"
    await clients.close()


async def test_the_waits_at_the_start_are_for_the_services_that_do_not_serve_yet(mesh, make_config) -> None:
    mesh.servers["trainer"].set_not_serving()
    address = f"127.0.0.1:{free_port()}"
    rollout = [*mesh.services.rollout, address]
    config = make_config(mesh.services.model_copy(update={"rollout": rollout}), deadlines={"startup_s": 60.0})
    clients = connect(config.services, unreachable_s=config.deadlines.unreachable_s)
    waits = Waits()
    waiting = asyncio.create_task(wait_for_services(config, clients, waits))

    def found() -> dict[str, tuple[str, ...]]:
        return {wait.what: wait.on for wait in waits.look(time.time())}

    expected = {
        "the rollout service to serve": (address, "rollout"),
        "the trainer to serve": (config.services.trainer, "trainer"),
    }
    try:
        await until(lambda: found() == expected)
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await clients.close()
