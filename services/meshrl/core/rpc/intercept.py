"""The server interceptor around every call: access, errors, trace context, refusal in a drain."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import grpc
from google.protobuf.message import DecodeError, Message
from loguru import logger
from opentelemetry import context as otel_context
from opentelemetry import trace

from meshrl.client.channel import CONTRACT_KEY
from meshrl.core.rpc.guard import CALLER, Caller, Guard
from meshrl.core.rpc.roles import check_runs, hide_runs
from meshrl.wire.errors import STATUS_DETAILS_KEY, MeshError, Reason, to_rpc_status
from meshrl.wire.trace import TRACEPARENT, context_from
from meshrl.wire.types import CONTRACT_VERSION
from meshrl.wire.validate import check

# Spans of calls under these prefixes would say nothing: they last as long as their caller, or are made every second.
_UNTRACED = ("Watch", "Session", "Attach", "Get", "List")
_OVER = (grpc.aio.AbortError, grpc.aio.InternalError)
"""The servicer has answered already, or the caller has left. gRPC itself deals with both."""
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_STOP_UPLOAD_S = 5.0


@dataclass(frozen=True)
class _Method:
    """`is_ours` is false for health and reflection."""

    name: str
    takes_stream: bool
    deserialize: Callable[[bytes], object]
    is_ours: bool

    async def request(
        self, received: AsyncIterator[bytes], context: grpc.aio.ServicerContext, caller: Caller | None
    ) -> object:
        """The one message, or an iterator over all of them. Raises as `parse`, and INVALID_REQUEST without the one."""
        if self.takes_stream:
            return _ParsedRequests(self, received, caller)
        data = await context.read()
        if data is grpc.aio.EOF:
            raise MeshError(Reason.INVALID_REQUEST, f"{self.name} was called without a message; send one")
        return self.parse(data, caller)

    def parse(self, data: bytes, caller: Caller | None) -> object:
        """Raises INVALID_REQUEST for bytes that break the schema, PERMISSION_DENIED for another run than the
        caller's."""
        try:
            message = self.deserialize(data)
            if caller is not None and caller.scope.runs:
                check_runs(caller, caller.scope.runs, self.name, message)
        except DecodeError as error:
            text = f"{self.name} was sent {len(data)} bytes that are not its message: {error}"
            raise MeshError(Reason.INVALID_REQUEST, text) from error
        if self.is_ours and isinstance(message, Message):
            check(message)
        return message


class _ParsedRequests:
    def __init__(self, method: _Method, received: AsyncIterator[bytes], caller: Caller | None) -> None:
        self._method, self._received, self._caller = method, received, caller

    def __aiter__(self) -> _ParsedRequests:
        return self

    async def __anext__(self) -> object:
        return self._method.parse(await anext(self._received), self._caller)


async def _stop_upload(request: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    """Has the sender of an upload stop, and reads until it does: an answer sent into a running upload may get lost, see
    `ServiceClient._upload`."""
    await context.send_initial_metadata(((CONTRACT_KEY, CONTRACT_VERSION),))
    with suppress(TimeoutError, grpc.aio.InternalError):  # a sender that goes on or has left: answer all the same
        async with asyncio.timeout(_STOP_UPLOAD_S):
            async for _ in request:
                pass


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """A servicer's MeshError becomes its gRPC status with details; any other exception is logged and becomes INTERNAL.

    Requests are parsed here, since gRPC answers UNKNOWN with a traceback for bytes that are no message, and never
    answers a call without its message. Services of meshrl are also counted, refused in a drain and guarded, with the
    caller's trace context current inside the servicer.
    """

    def __init__(self, tracer: trace.Tracer, guard: Guard | None = None) -> None:
        self._tracer = tracer
        self._guard = guard
        self._callers: dict[asyncio.Task[object], Caller] = {}
        self._shut_out: dict[asyncio.Task[object], MeshError] = {}
        self._sending: set[asyncio.Task[object]] = set()
        self._tasks: set[asyncio.Task[object]] = set()  # of calls in service, until gRPC has sent their answers
        self._cut_off_why = ""
        self.refusing = False

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    async def wait_idle(self, deadline_s: float) -> bool:
        """Until all calls in service are answered; False after `deadline_s`."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + deadline_s
        while self._tasks and (left_s := end_s - loop.time()) > 0:
            await asyncio.wait(self._tasks, timeout=left_s)
        return not self._tasks

    async def cut_off(self, why: str, deadline_s: float) -> None:
        """Ends the calls in service, and waits until their callers have been sent why."""
        self._cut_off_why = why
        for task in self._tasks:
            task.cancel()
        await self.wait_idle(deadline_s)

    def shut_out(self) -> None:
        """Ends the calls of revoked callers."""
        for task, caller in list(self._callers.items()):
            if self._guard is None or task in self._shut_out:
                continue
            why = self._guard.why_not(caller, standing=True)
            if why is None:
                continue
            logger.warning("ending a call of {}: {}", caller, why.message)
            self._shut_out[task] = why
            if task not in self._sending:  # else it ends by itself; cancelled there, gRPC would tell the caller nothing
                task.cancel()

    @contextmanager
    def _sending_from(self) -> Iterator[None]:
        """Raises the reason if the caller was shut out meanwhile."""
        task = asyncio.current_task()
        assert task is not None  # gRPC runs each call in one
        self._sending.add(task)
        try:
            yield
        finally:
            self._sending.discard(task)
        if task in self._shut_out:
            raise self._shut_out[task]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        name = handler_call_details.method.removeprefix("/")
        deserialize = handler.request_deserializer or bytes
        method = _Method(name, handler.request_streaming, deserialize, name.startswith("meshrl."))
        kind = "_".join(
            "stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming)
        )
        behaviour = getattr(handler, kind)
        if inspect.isasyncgenfunction(behaviour):
            stream = self._around_stream(behaviour, method)
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        call = self._around_call(behaviour, method)
        return grpc.stream_unary_rpc_method_handler(call, None, handler.response_serializer)

    def _around_call(
        self, behaviour: Callable[[object, grpc.aio.ServicerContext], Awaitable[object]], method: _Method
    ) -> Callable[..., Awaitable[object]]:
        async def call(received: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> object:
            with self._served(context, method) as span:
                try:
                    caller = self._admit(method, context)
                    answer = await behaviour(await method.request(received, context, caller), context)
                    if caller is not None:
                        hide_runs(caller.scope.runs, method.name, answer)
                    if method.takes_stream:
                        await _stop_upload(received, context)
                    return answer
                except asyncio.CancelledError:
                    await self._abort_if_cut_off(context, span, method.name)
                    raise
                except Exception as error:  # noqa: BLE001  # the boundary: whatever failed is told to the caller
                    if method.takes_stream and not isinstance(error, _OVER):
                        await _stop_upload(received, context)
                    await self._abort(context, span, method.name, error)

        return call

    def _around_stream(
        self, behaviour: Callable[[object, grpc.aio.ServicerContext], AsyncGenerator[object, None]], method: _Method
    ) -> Callable[..., AsyncIterator[object]]:
        async def stream(received: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[object]:
            with self._served(context, method) as span:
                try:
                    caller = self._admit(method, context)
                    request = await method.request(received, context, caller)
                    # Tells the client that the stream stands before there is anything to say.
                    await context.send_initial_metadata(((CONTRACT_KEY, CONTRACT_VERSION),))
                    async with aclosing(behaviour(request, context)) as messages:
                        async for message in messages:
                            with self._sending_from():
                                yield message
                except asyncio.CancelledError:
                    await self._abort_if_cut_off(context, span, method.name)
                    raise
                except Exception as error:  # noqa: BLE001  # the boundary: whatever failed is told to the caller
                    await self._abort(context, span, method.name, error)

        return stream

    def _admit(self, method: _Method, context: grpc.aio.ServicerContext) -> Caller | None:
        if not method.is_ours:
            return None
        caller = None
        if self._guard is not None:
            caller = self._guard.admit(method.name, context)
            CALLER.set(caller)
            task = asyncio.current_task()
            if task is not None:
                self._callers[task] = caller
        if self.refusing:
            raise MeshError(Reason.DRAINING)
        return caller

    @contextmanager
    def _served(self, context: grpc.aio.ServicerContext, method: _Method) -> Iterator[trace.Span]:
        if not method.is_ours:
            yield trace.INVALID_SPAN
            return
        task = asyncio.current_task()
        assert task is not None  # gRPC runs each call in one
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        span = self._start_span(context, method.name)
        try:
            yield span
        except (asyncio.CancelledError, GeneratorExit):  # the caller gave up, or the server stops
            if context.time_remaining() == 0.0:
                code, why = "DEADLINE_EXCEEDED", "the deadline that its caller set has passed"
            else:
                code, why = "CANCELLED", "its caller cancelled it or is gone"
            logger.debug("{} is broken off: {}", method.name, why)
            if span.is_recording():
                span.set_attribute("rpc.response.status_code", code)
            raise
        finally:
            span.end()
            self._callers.pop(task, None)
            self._shut_out.pop(task, None)

    def _start_span(self, context: grpc.aio.ServicerContext, method: str) -> trace.Span:
        remote = None
        for key, value in context.invocation_metadata() or ():
            if key == TRACEPARENT and isinstance(value, str):
                remote = context_from(value)
        if method.rsplit("/", 1)[-1].startswith(_UNTRACED):
            if remote is not None:
                otel_context.attach(remote)
            return trace.INVALID_SPAN
        span = self._tracer.start_span(method, context=remote, kind=trace.SpanKind.SERVER)
        if span.is_recording():
            span.set_attributes({"rpc.system.name": "grpc", "rpc.method": method, "rpc.response.status_code": "OK"})
        otel_context.attach(trace.set_span_in_context(span, remote))
        return span

    async def _abort_if_cut_off(self, context: grpc.aio.ServicerContext, span: trace.Span, method: str) -> None:
        task = asyncio.current_task()
        if task in self._shut_out:
            await self._abort(context, span, method, self._shut_out[task])
        if self._cut_off_why:
            error = MeshError(Reason.DRAINING, f"the server ended {method}: {self._cut_off_why}")
            await self._abort(context, span, method, error)

    async def _abort(
        self, context: grpc.aio.ServicerContext, span: trace.Span, method: str, error: Exception
    ) -> NoReturn:
        if isinstance(error, _OVER):
            raise error
        if isinstance(error, NotImplementedError):  # what generated servicers raise for a method that is left out
            error = MeshError(Reason.NOT_SUPPORTED, f"{method} is not offered by this server")
        if not isinstance(error, MeshError):
            logger.opt(exception=error).error("{} failed", method)
            error = MeshError(Reason.INTERNAL, f"{method} failed: {type(error).__name__}: {error}")
        if span.is_recording():
            span.set_attribute("rpc.response.status_code", error.reason.code.name)
            span.set_attribute("error.type", error.reason.name)
            if error.reason is Reason.INTERNAL:
                span.set_status(trace.StatusCode.ERROR, str(error))
        status = to_rpc_status(error)
        trailing: list[tuple[str, str | bytes]] = [(STATUS_DETAILS_KEY, status.SerializeToString())]
        if error.reason is Reason.DRAINING:
            trailing.append((_PUSHBACK_KEY, "-1"))  # this server will not come back: do not ask it again
        elif error.retry_after_s is not None:  # gRPC's own repetitions do not read RetryInfo
            trailing.append((_PUSHBACK_KEY, str(math.ceil(error.retry_after_s * 1000))))
        await context.abort(error.reason.code, status.message, tuple(trailing))
        raise AssertionError("abort raises")
