"""The gRPC server of a program, from its port to its drain."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc
from loguru import logger
from opentelemetry import trace

from meshrl.client.credentials import CredentialError, Credentials, default_credentials
from meshrl.core.config.base import ConfigError
from meshrl.core.config.schema import flag
from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.guard import guard_of
from meshrl.core.rpc.health import HealthServicer
from meshrl.core.rpc.intercept import CallInterceptor
from meshrl.core.rpc.reflection import add_reflection

ServicerT = TypeVar("ServicerT")


DEFAULT_MAX_MESSAGE_BYTES = 64 * 2**20
MIN_PING_INTERVAL_S = 5.0
SAY_GOODBYE_S = 5.0
LOOK_AT_CALLERS_S = 1.0
"""Between looks for revoked callers."""

HANDSHAKE_S = 20.0
"""Over far lines as well."""

IDLE_S = 300.0
"""Without a call, until a connection is ended; its client connects again with its next call."""

HEALTH_SERVICE = "grpc.health.v1.Health"
# How long and how many calls wait for a busy event loop. Beyond its own limits (30 s; some of the calls after the first
# 1,000, all after 3,000) gRPC cancels them without a line in any log. Here the deadline of each call is the limit.
MAX_UNREQUESTED_S = 24 * 3600
MAX_PENDING_CALLS = 65536


class GrpcServer:
    """One server with health per service, reflection and the mesh's call interceptor.

    Order of use: `add` each service, `start`, `set_serving` when warm, `drain`; created on the event loop that runs it.
    Raises ConfigError for credentials, by default of the MESHRL_TLS_ variables, and as `check_bind`.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        min_ping_interval_s: float = MIN_PING_INTERVAL_S,
        tracer: trace.Tracer | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        try:
            self._credentials = credentials or default_credentials()
            guard = guard_of(self._credentials)
        except CredentialError as error:
            raise ConfigError(str(error)) from error
        check_bind(config, encrypted=self._credentials.encrypted)
        self._config = config
        self._checks = guard is not None
        self._shutting_out: asyncio.Task[None] | None = None
        self._services: list[str] = []
        self._health = HealthServicer()
        self._calls = CallInterceptor(tracer or trace.get_tracer("meshrl.server"), guard)
        self._server = grpc.aio.server(
            interceptors=[self._calls], options=server_options(max_message_bytes, min_ping_interval_s)
        )

    @property
    def in_flight(self) -> int:
        return self._calls.in_flight

    def add(self, service: str, adder: Callable[[ServicerT, grpc.aio.Server], None], servicer: ServicerT) -> None:
        """By its full name, with the generated `add_XServicer_to_server`."""
        adder(servicer, self._server)
        self._services.append(service)

    async def start(self) -> int:
        """Returns the port. Raises ConfigError when it cannot be bound."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._health.set(self._services, serving=False)
        add_reflection((*self._services, HEALTH_SERVICE), self._server)
        try:
            bound = self._credentials.add_port(self._server, self._config.address)
        except RuntimeError as error:  # how grpc says that it could not bind
            raise ConfigError(
                f"cannot listen on {self._config.address}: {error}; set another server.port, or 0 for a free one"
            ) from error
        await self._server.start()
        if self._checks:
            self._shutting_out = asyncio.create_task(self._shut_out())
        return bound

    async def _shut_out(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AT_CALLERS_S)
            self._calls.shut_out()

    def set_serving(self) -> None:
        self._health.set(self._services, serving=True)

    def set_not_serving(self) -> None:
        """Calls are still taken."""
        self._health.set(self._services, serving=False)

    async def drain(self, grace_s: float) -> None:
        """Refuses new calls with DRAINING, waits for those in flight, cancels them after `grace_s`, and stops. Health
        and reflection answer until the end."""
        self.set_not_serving()
        self._calls.refusing = True
        if not await self._calls.wait_idle(grace_s):
            logger.warning("cancelling {} calls that did not end within {:g} s", self._calls.in_flight, grace_s)
            why = f"it shuts down and has waited for {grace_s:g} s"
            await self._calls.cut_off(why, SAY_GOODBYE_S)
        await self._server.stop(None)
        if self._shutting_out is not None:
            self._shutting_out.cancel()
            await asyncio.wait({self._shutting_out})


def server_options(
    max_message_bytes: int, min_ping_interval_s: float, *, handshake_s: float = HANDSHAKE_S, idle_s: float = IDLE_S
) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", round(min_ping_interval_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", round(handshake_s * 1000)),
        ("grpc.max_connection_idle_ms", round(idle_s * 1000)),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.lookahead_bytes", 4 * 2**20),
        ("grpc.server_max_unrequested_time_in_server", MAX_UNREQUESTED_S),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind it
    ]


def check_bind(config: ServerConfig, *, encrypted: bool = False) -> None:
    """Raises ConfigError unless connections are encrypted, the host is loopback, or `insecure` is set."""
    if not encrypted and not config.insecure and not is_loopback(config.host):
        raise ConfigError(
            f"server.host is {config.host}, which others can reach, and there is no TLS; "
            f"use 127.0.0.1, or allow it with {flag('server.insecure')}"
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: only this one is known to stay here
        return host == "localhost"
