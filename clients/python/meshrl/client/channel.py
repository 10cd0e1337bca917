"""The base of all clients: one channel with limits, keepalive, retries, deadlines, trace context and errors.

A failed call raises `MeshError` and nothing else. Only UNAVAILABLE on idempotent unary calls is retried; streams resume
by revision or offset instead.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace

from meshrl.client.backoff import AWAY_S, Backoff
from meshrl.client.credentials import Credentials, default_credentials
from meshrl.client.reloading import ReloadingChannel
from meshrl.wire.errors import MeshError, Reason, from_rpc_error
from meshrl.wire.trace import TRACEPARENT, format_traceparent

# A server sends this with the initial metadata of every stream: the sign that the stream stands.
CONTRACT_KEY = "meshrl-contract"
RECONNECT_MS = 250
"""Longest wait between attempts to connect."""
LOOKAHEAD_BYTES = 4 * 2**20
CONNECT_MS = 2000
"""For one attempt: a far server takes several round trips."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class ChannelOptions:
    """In seconds: `transfer_stall_s` without a chunk of a version, `stream_margin_s` for a group's stream beyond its
    deadline_s, `reconnect_s` for a watch to find its server again."""

    unary_deadline_s: float = 30.0
    upload_deadline_s: float = 120.0
    transfer_stall_s: float = 60.0
    checkpoint_deadline_s: float = 600.0
    stream_margin_s: float = 15.0
    reconnect_s: float = 60.0
    max_message_bytes: int = 64 * 2**20
    keepalive_s: float = 20.0
    keepalive_timeout_s: float = 10.0
    retry_attempts: int = 4
    retry_backoff_s: float = 0.2
    credentials: Credentials | None = None
    """None takes what the MESHRL_TLS_ variables name."""


def service_config(service: str, methods: Sequence[str], options: ChannelOptions) -> str:
    """gRPC's service config (JSON) that retries UNAVAILABLE on these idempotent `methods`."""
    retry = {
        "maxAttempts": options.retry_attempts,
        "initialBackoff": f"{options.retry_backoff_s:.3f}s",
        "maxBackoff": f"{options.retry_backoff_s * 8:.3f}s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [{"service": service, "method": method} for method in methods]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": retry}]})


def channel_arguments(config: str, options: ChannelOptions) -> list[tuple[str, int | str]]:
    return [
        ("grpc.service_config", config),
        ("grpc.enable_retries", 1),
        ("grpc.max_send_message_length", options.max_message_bytes),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.keepalive_time_ms", round(options.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(options.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", int("grpc_proxy" in os.environ)),  # http_proxy is for the web
    ]


class Outgoing:
    """The messages of an upward stream; `stopped` ends it before the next one.

    grpc.aio reports an error of their source as a cancelled call: `raise_failure` has the reason.
    """

    def __init__(self, source: AsyncGenerator[object, None]) -> None:
        self._source = source
        self._failure: Exception | None = None
        self.stopped = False

    async def messages(self) -> AsyncGenerator[object, None]:
        async with aclosing(self._source):
            try:
                async for message in self._source:
                    if self.stopped:
                        return
                    yield message
            except Exception as error:  # kept for the caller of the call, whatever it is
                self._failure = error
                raise

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class ServiceClient:
    """Owns the channel to one server. Use as an async context manager, or call `close`."""

    service: str
    server_role: str
    idempotent_methods: tuple[str, ...]

    def __init__(
        self, address: str, options: ChannelOptions | None = None, *, tracer: trace.Tracer | None = None
    ) -> None:
        self.address = address
        self.options = options or ChannelOptions()
        config = service_config(self.service, self.idempotent_methods, self.options)
        self._credentials = self.options.credentials or default_credentials()
        self._channel = self._credentials.open_channel(
            address, channel_arguments(config, self.options), self.server_role
        )
        self._tracer = tracer or trace.get_tracer("meshrl.client")
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace_s: float | None = None) -> None:
        """Ends calls that still run after `grace_s`; they raise CANCELLED."""
        self._is_closed = True
        await self._channel.close(grace_s)

    async def wait_until_connected(self, deadline_s: float) -> None:
        """Waits for the connection with its TLS. Raises UNREACHABLE."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._channel.channel_ready()
        except TimeoutError as error:
            text = f"no connection to {self.address} within {deadline_s:g} s"
            raise MeshError(Reason.UNREACHABLE, text) from error

    async def why_not_serving(self, deadline_s: float) -> str:
        """Empty if the server's health is SERVING, else its answer. Raises NOT_SUPPORTED without a health service."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=self.service), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:  # it may come
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise MeshError(
                    Reason.NOT_SUPPORTED,
                    f"the server at {self.address} does not offer grpc.health.v1.Health, by which {self.service}"
                    " says that it is ready; add it to that server, or correct the address",
                ) from error
            return str(error.details() or error.code().name)
        if reply.status == health_pb2.HealthCheckResponse.SERVING:
            return ""
        return f"its health says {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"

    async def wait_until_serving(self, deadline_s: float, on_wait: Callable[[str], None] = lambda why: None) -> None:
        """`on_wait` gets the reason at once and when it changes. Raises UNREACHABLE after `deadline_s`, and
        NOT_SUPPORTED at once without a health service."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        last = "no answer"
        told = ""
        while (left := end - loop.time()) > 0:
            why = await self.why_not_serving(min(left, 2.0))
            if not why:
                return
            if loop.time() < end or last == "no answer":  # else only the time was up, which says less
                last = why
            if last != told:
                told = last
                on_wait(last)
            await asyncio.sleep(min(0.1, max(end - loop.time(), 0.0)))
        raise MeshError(
            Reason.UNREACHABLE, f"{self.service} at {self.address} was not serving within {deadline_s:g} s: {last}"
        )

    async def _unary(
        self, call: Callable[..., Awaitable[_T]], method: str, request: object, deadline_s: float | None = None
    ) -> _T:
        timeout_s = self.options.unary_deadline_s if deadline_s is None else deadline_s
        with self._span(method) as (span, metadata):
            pending = call(request, timeout=timeout_s, metadata=metadata)
            try:
                return await pending
            except grpc.aio.AioRpcError as error:
                raise self._failed(span, method, error, timeout_s) from error
            except asyncio.CancelledError:
                self._raise_if_ended(pending, method)
                raise

    async def _upload(
        self,
        call: Callable[..., Awaitable[_T]],
        method: str,
        messages: AsyncGenerator[object, None],
        deadline_s: float | None,
    ) -> _T:
        """Sends until the server begins to answer: else grpc.aio would report a failed write instead of an early
        refusal (grpc/grpc#36066)."""
        upload = Outgoing(messages)

        async def listen(pending: grpc.aio.Call) -> None:
            await pending.initial_metadata()
            upload.stopped = True

        with self._span(method) as (span, metadata):
            pending = call(upload.messages(), timeout=deadline_s, metadata=metadata)
            listener = asyncio.create_task(listen(pending))
            try:
                return await pending
            except grpc.aio.AioRpcError as error:
                raise self._failed(span, method, error, deadline_s) from error
            except asyncio.CancelledError:
                upload.raise_failure()
                self._raise_if_ended(pending, method)
                raise
            finally:
                listener.cancel()

    async def _stream(
        self,
        call: grpc.aio.UnaryStreamMultiCallable,
        method: str,
        request: object,
        deadline_s: float | None,
        on_standing: Callable[[], None] | None = None,
        with_span: bool = False,
    ) -> AsyncGenerator[Any, None]:
        """Ending the iteration early cancels the call. `on_standing` is called once the server serves the stream.
        Streams that last as long as the process have no span."""
        with self._span(method, start=with_span) as (span, metadata):
            outgoing = Outgoing(request) if isinstance(request, AsyncGenerator) else None
            stream = call(outgoing.messages() if outgoing else request, timeout=deadline_s, metadata=metadata)
            try:
                if on_standing is not None and any(key == CONTRACT_KEY for key, _ in await stream.initial_metadata()):
                    on_standing()
                async for message in stream:
                    yield message
            except grpc.aio.AioRpcError as error:
                raise self._failed(span, method, error, deadline_s) from error
            except asyncio.CancelledError:
                if outgoing is not None:
                    outgoing.raise_failure()
                self._raise_if_ended(stream, method)
                raise
            finally:
                stream.cancel()

    async def _watch(
        self,
        call: grpc.aio.UnaryStreamMultiCallable,
        method: str,
        request_from: Callable[[int], object],
        after_revision: int,
        parse: Callable[[Any], _T | None],
    ) -> AsyncGenerator[_T, None]:
        """Parsed events by revision, over as many streams as it takes.

        A broken stream is opened again from the last revision, for up to `reconnect_s`. Events unknown to `parse` are
        skipped. Ends when the server ends the stream.
        """
        loop = asyncio.get_running_loop()
        last_seen = after_revision
        lost_at: float | None = None
        backoff = Backoff(*AWAY_S)

        def stands() -> None:
            nonlocal lost_at
            lost_at = None
            backoff.reset()

        while True:
            try:
                async with aclosing(self._stream(call, method, request_from(last_seen), None, stands)) as stream:
                    async for message in stream:
                        if message.revision <= last_seen:
                            continue
                        last_seen = message.revision
                        event = parse(message)
                        if event is not None:
                            yield event
                    return
            except MeshError as error:
                # A server that stops ends its streams; one that dies is unreachable. Both may come back.
                lost_at = loop.time() if lost_at is None else lost_at
                waited_s, wait_s = loop.time() - lost_at, backoff.next_s()
                is_lost = error.reason in (Reason.UNREACHABLE, Reason.DRAINING, Reason.CANCELLED)
                if not is_lost or self._is_closed or waited_s + wait_s > self.options.reconnect_s:
                    raise
            await asyncio.sleep(wait_s)

    @contextmanager
    def _span(self, method: str, start: bool = True) -> Iterator[tuple[trace.Span, tuple[tuple[str, str], ...] | None]]:
        """A client span, and the metadata with its context. Frequent gets and lists have none."""
        if not start or method.startswith(("Get", "List")):
            yield trace.INVALID_SPAN, self._metadata(trace.get_current_span())
            return
        full_method = f"{self.service}/{method}"
        span = self._tracer.start_span(full_method, kind=trace.SpanKind.CLIENT)
        if not span.is_recording():
            yield span, self._metadata(span)
            return
        span.set_attributes(
            {
                "rpc.system.name": "grpc",
                "rpc.method": full_method,
                "rpc.response.status_code": "OK",
                "server.address": self.address,
            }
        )
        try:
            yield span, self._metadata(span)
        except (asyncio.CancelledError, GeneratorExit):  # the caller gave up; the trace says so
            span.set_attribute("rpc.response.status_code", "CANCELLED")
            raise
        finally:
            span.end()

    def _metadata(self, span: trace.Span) -> tuple[tuple[str, str], ...] | None:
        traceparent = format_traceparent(span.get_span_context())
        metadata = self._credentials.metadata()
        return ((*metadata, (TRACEPARENT, traceparent)) if traceparent else metadata) or None

    def _raise_if_ended(self, call: object, method: str) -> None:
        """Raises MeshError if a revocation or `close` ended the call, for which gRPC raises CancelledError too."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return
        if isinstance(self._channel, ReloadingChannel) and self._channel.was_cut(call):
            raise MeshError(
                Reason.UNREACHABLE,
                f"the call to {self.address} was ended, since a certificate of the role {self.server_role} is revoked;"
                " the next call connects anew, to a server whose certificate is not",
            )
        if self._is_closed:
            raise MeshError(Reason.CANCELLED, f"the client of {self.address} was closed during {self.service}/{method}")

    def _failed(
        self, span: trace.Span, method: str, error: grpc.aio.AioRpcError, deadline_s: float | None
    ) -> MeshError:
        call = f"{self.service}/{method} of {self.address}"
        failure = from_rpc_error(error, call=call, deadline_s=deadline_s)
        failure.add_note(f"in {call}")
        if span.is_recording():
            span.set_attribute("rpc.response.status_code", error.code().name)
            span.set_attribute("error.type", failure.reason.name)
            span.set_status(trace.StatusCode.ERROR, str(failure))
        return failure
