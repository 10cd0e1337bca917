"""The `weights` program: runs one hub, or a relay of a hub, behind a gRPC server, from start to drain."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path

from loguru import logger
from opentelemetry import trace

from meshrl.client import WeightSyncClient
from meshrl.client.authority import Authority, AuthorityError
from meshrl.client.credentials import INSECURE, CredentialFiles, default_credentials
from meshrl.client.trust import Role, TrustFile
from meshrl.core.config import ConfigError, load_config
from meshrl.core.config.shared import ServerConfig
from meshrl.core.credentials.identity import as_member
from meshrl.core.credentials.secret import read_secret
from meshrl.core.durable import disk_trouble
from meshrl.core.paths import Layout
from meshrl.core.program import run_program, say_ready
from meshrl.core.rpc.enrollment import SERVICE as ENROLLMENT
from meshrl.core.rpc.enrollment import EnrollmentServicer, open_entry
from meshrl.core.rpc.serve import GrpcServer
from meshrl.core.telemetry.exposition import registry_of
from meshrl.core.telemetry.waits import waits_of
from meshrl.core.waiting import stop_or_first
from meshrl.prime_rl import PrimeRLKeys
from meshrl.v1.identity_pb2_grpc import add_EnrollmentServiceServicer_to_server
from meshrl.versions.sources import LinkLimits
from meshrl.weights.config import WeightsConfig
from meshrl.weights.coordinator.coordinator import Coordinator
from meshrl.weights.coordinator.line import LineLimits
from meshrl.weights.decision_log import LogError
from meshrl.weights.engine_calls import EngineCaller
from meshrl.weights.hub import Hub
from meshrl.weights.metrics import HubMetrics
from meshrl.weights.raw_server import RawServer
from meshrl.weights.relay import Relay
from meshrl.weights.service import RelayService, WeightSyncService
from meshrl.wire import frames

DRAIN_GRACE_S = 5.0


def build_hub(config: WeightsConfig, tracer: trace.Tracer | None = None) -> Hub:
    limits = LineLimits(
        keep_versions=config.keep_versions,
        min_engines=config.min_engines,
        commit_deadline_s=config.commit_deadline_s,
    )
    coordinator = Coordinator(limits, lease_s=config.lease_s, max_chunk_bytes=config.max_chunk_bytes)
    return Hub(
        coordinator,
        spool_dir=config.spool_dir or config.output_dir / "weight_hub",
        max_chunk_bytes=config.max_chunk_bytes,
        verify_files=config.verify_files,
        tracer=tracer,
    )


async def serve(config: WeightsConfig, stop: asyncio.Event, tracer: trace.Tracer) -> int:
    """Runs the hub until `stop` is set or its log fails. Returns the exit code."""
    api_key = read_secret(
        "weights.engine_api_key", None, file=config.engine_api_key_file, variable=config.engine_api_key_var,
        environ=os.environ,
    )  # fmt: skip
    if config.upstream is not None:
        async with WeightSyncClient(config.upstream) as client:
            relay = Relay(
                client,
                LinkLimits(connections=config.connections, mbps=config.max_mbps, stall_s=config.stall_s),
                spool_dir=config.spool_dir or config.output_dir / "weight_relay",
                max_chunk_bytes=config.max_chunk_bytes,
                keep_versions=config.keep_versions,
            )
            await serve_relay(relay, config.upstream, config.server, stop, tracer)
        return 0
    calling: asyncio.Task[None] | None = None
    hub = build_hub(config, tracer)
    registry_of(tracer).register(HubMetrics(hub.coordinator))
    try:
        await hub.start()
    except (LogError, OSError) as error:
        logger.error("the hub cannot start: {}", disk_trouble(error) or error)
        return 1
    server, raw = GrpcServer(config.server, tracer=tracer), None
    if config.raw_port is not None and default_credentials() is INSECURE:
        raw = RawServer(hub, config.server.host, config.raw_port)
    server.add(frames.SERVICE, frames.add_weight_sync, WeightSyncService(hub, on_drained=stop.set, raw=raw))
    enrollment, entry = _enrollment(Layout(config.output_dir).credentials, config.enrollment_port), None
    if enrollment is not None:
        server.add(ENROLLMENT, add_EnrollmentServiceServicer_to_server, enrollment)
    try:
        if raw is not None:
            raw.start()
            logger.info("weights: raw bytes at {}:{}", config.server.host, raw.port)
        port = await server.start()
        if enrollment is not None and config.enrollment_port is not None:
            enrollment.renewal_port = port
            entry, joins_at = await open_entry(enrollment, config.server.host, config.enrollment_port)
            logger.info("weights: hosts join this run at {}:{}", config.server.host, joins_at)
        waits_of(tracer).serves = (f"{config.server.host}:{port}",)
        server.set_serving()
        say_ready(tracer)
        logger.info("weights: serving WeightSync at {}:{}", config.server.host, port)
        caller = EngineCaller(
            config.engines,
            host=config.server.host,
            port=port,
            api_key=api_key,
            token=_token_for_engines() if config.engines else None,
            registered=lambda: {engine.url for engine in hub.list_engines("")},
        )
        calling = asyncio.create_task(caller.run(stop))
        await stop_or_first(stop, hub.failed, *([calling] if config.engines else []))
    finally:
        if calling is not None:
            calling.cancel()
        server.set_not_serving()
        hub.close_streams()
        if raw is not None:
            await raw.stop()
        if entry is not None:
            await entry.drain(0.0)
        await server.drain(DRAIN_GRACE_S)
        await hub.stop()
    return 1 if hub.failed.done() else 0


async def serve_relay(relay: Relay, upstream: str, at: ServerConfig, stop: asyncio.Event, tracer: trace.Tracer) -> None:
    """Until `stop` is set. `upstream` is the hub."""
    server = GrpcServer(at, tracer=tracer)
    server.add(frames.SERVICE, frames.add_weight_sync, RelayService(relay, upstream))
    try:
        await relay.start()
        port = await server.start()
        server.set_serving()
        say_ready(tracer)
        logger.info("weights: relaying the hub at {} at {}:{}", upstream, at.host, port)
        await stop.wait()
    finally:
        server.set_not_serving()
        await relay.stop()
        await server.drain(DRAIN_GRACE_S)


def _enrollment(folder: Path, port: int | None) -> EnrollmentServicer | None:
    """None without the run's authority here. Raises ConfigError where hosts are to join without it."""
    if port is None and not os.path.exists(folder / "ca.key"):
        return None
    try:
        return EnrollmentServicer(Authority(folder))
    except AuthorityError as error:
        raise ConfigError(f"weights.enrollment_port: {error}") from error


def _token_for_engines() -> str | None:
    files = CredentialFiles.from_environ(os.environ)
    if files.trust is None or files.cert is not None:  # with certificates, engines have their own
        return None
    try:
        return TrustFile(files.trust).add_token(Role.AGENT, id_="called-engine")
    except sqlite3.Error as error:
        raise ConfigError(f"tls.trust {str(files.trust)!r} cannot be written: {error}; name another") from error


def main() -> None:
    """Console script `weights`."""
    config = load_config(WeightsConfig, prog="weights", spellings=PrimeRLKeys(WeightsConfig, "weights"))
    role = Role.HUB if config.upstream is None else Role.RELAY
    run_program("weights", config, as_member(role, serve))


if __name__ == "__main__":
    main()
