"""`meshrl-verifiers-v0 envs.toml`: hosts old environments until it gets SIGTERM, then drains."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import verifiers as vf
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from meshrl.client import WeightSyncClient
from meshrl.client.credentials import default_credentials
from meshrl.machine.addresses import address_of
from meshrl.v1 import rollout_pb2_grpc as pb_grpc
from meshrl_verifiers_v0.config import ServiceConfig, read_config
from meshrl_verifiers_v0.engines import ChatEngines
from meshrl_verifiers_v0.groups import GroupPlayer
from meshrl_verifiers_v0.hosting import HostedOldEnv, load
from meshrl_verifiers_v0.service import OldEnvServicer

SERVICE = "meshrl.v1.RolloutService"
MAX_MESSAGE_BYTES = 64 * 2**20
OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
]


def main() -> None:
    parser = argparse.ArgumentParser(prog="meshrl-verifiers-v0", description=__doc__)
    parser.add_argument("config", type=Path, help="TOML file: see the README of this package")
    config = read_config(parser.parse_args().config)
    # verifiers 0.1 sets signal handlers as it builds an environment, so that is the main thread's work.
    asyncio.run(serve(config, [load(entry) for entry in config.env]))


async def serve(config: ServiceConfig, loaded: Sequence[vf.Environment]) -> None:
    """The environments of `config.env` are loaded in this order."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    hub = WeightSyncClient(config.weights) if config.weights else None
    api_key = os.environ.get(config.api_key_var) or "EMPTY"
    engines = ChatEngines(config.engines, hub, api_key=api_key, failover_s=config.failover_s)
    environments = {
        entry.resolved_name: HostedOldEnv(entry, env, engines, config.model, config.seq_len)
        for entry, env in zip(config.env, loaded, strict=True)
    }
    await engines.look()
    looking = asyncio.create_task(engines.look_forever())
    player = GroupPlayer(environments, engines, config.max_concurrent)
    server = grpc.aio.server(options=OPTIONS)
    pb_grpc.add_RolloutServiceServicer_to_server(OldEnvServicer(player), server)
    said = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(said, server)
    address = address_of(config.host, config.port)
    port = default_credentials().add_port(server, address)  # with certificates, for members alone
    await server.start()
    for name in (SERVICE, ""):
        await said.set(name, health_pb2.HealthCheckResponse.SERVING)
    sys.stdout.write(f"serving {', '.join(environments)} on port {port}\n")
    sys.stdout.flush()
    await stop.wait()
    for name in (SERVICE, ""):
        await said.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    await player.drain(config.drain_deadline_s)
    looking.cancel()
    await server.stop(5.0)
    await engines.close()
    if hub is not None:
        await hub.close()


if __name__ == "__main__":
    main()
