"""A connection to the server under test: raw calls and their refusals.

No retries and no conversion: a check sees messages and status as they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc

from meshrl.cli.call import CLIENTS, SERVICES, start_call
from meshrl.client.credentials import Credentials
from meshrl.wire.errors import STATUS_DETAILS_KEY, MeshError, Reason

MAX_MESSAGE_BYTES = 64 * 2**20
WRITE_FAILED = "Internal error from Core"  # grpc.aio, of an upload that the server answered in the midst of a write
UPLOAD_TRIES = 5


class RuleBrokenError(Exception):
    """The text describes the deviation."""


class NotCheckedError(Exception):
    """The text gives the reason."""


class RefusedError(Exception):
    """A call's error: its gRPC status and details as they came."""

    def __init__(self, method: str, error: grpc.aio.AioRpcError) -> None:
        self.method = method
        self.code: grpc.StatusCode = error.code()
        self.text = error.details() or ""
        self.details_bytes = 0
        self.status: status_pb2.Status | None = None
        self.info: error_details_pb2.ErrorInfo | None = None
        self.fields: tuple[str, ...] = ()
        self.tells_when = False
        for key, value in error.trailing_metadata() or ():
            if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
                self.details_bytes = len(value)
                status = status_pb2.Status()
                with suppress(DecodeError):  # then there are none: errors.details says so
                    status.ParseFromString(value)
                    self.status = status
                for detail in status.details:
                    if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                        self.info = error_details_pb2.ErrorInfo()
                        detail.Unpack(self.info)
                    elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                        bad = error_details_pb2.BadRequest()
                        detail.Unpack(bad)
                        self.fields += tuple(item.field for item in bad.field_violations)
                    elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                        self.tells_when = True
        super().__init__(str(self))

    def __str__(self) -> str:
        reason = f" ({self.info.reason})" if self.info is not None else ""
        return f"{self.method} ended with {self.code.name}{reason}: {self.text[:200]}"


@dataclass(kw_only=True)
class Probe:
    """`memory` keeps findings for later checks."""

    address: str
    service: str
    channel: grpc.aio.Channel
    credentials: Credentials
    deadline_s: float
    full: bool
    refusals: list[RefusedError] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        """The service's full name, meshrl.v1.*."""
        return str(SERVICES[self.service].full_name)

    @property
    def health(self) -> health_pb2_grpc.HealthStub:
        """The stub of grpc.health.v1.Health."""
        return health_pb2_grpc.HealthStub(self.channel)

    async def call(
        self, method: str, *requests: Message, until: Callable[[Sequence[Any]], bool] = lambda answers: False
    ) -> list[Any]:
        """Every answer, or those until `until` holds. Raises RefusedError."""
        for _ in range(UPLOAD_TRIES):
            try:
                return await self._call(method, requests, until)
            except RefusedError as refusal:
                if refusal.text == WRITE_FAILED:
                    continue
                self.refusals.append(refusal)
                if refusal.code is grpc.StatusCode.PERMISSION_DENIED:
                    raise NotCheckedError(f"not for the role of these credentials: {refusal.text}") from refusal
                raise
        raise NotCheckedError(f"{method} was refused in the midst of the upload {UPLOAD_TRIES} times")

    async def _call(
        self, method: str, requests: Sequence[Message], until: Callable[[Sequence[Any]], bool]
    ) -> list[Any]:
        described = SERVICES[self.service].methods_by_name[method]
        pending = start_call(
            self.channel, described, requests, deadline_s=self.deadline_s, credentials=self.credentials
        )
        answers: list[Any] = []
        try:
            if not described.server_streaming:
                return [await pending]
            async for message in pending:
                answers.append(message)
                if until(answers):
                    break
        except grpc.aio.AioRpcError as error:
            raise RefusedError(method, error) from error
        finally:
            pending.cancel()
        return answers

    async def refused(self, method: str, *requests: Message, reason: Reason) -> RefusedError:
        """A call that must end with `reason` and its status. Raises RuleBrokenError."""
        try:
            await self.call(method, *requests)
        except RefusedError as refusal:
            wrong = refusal.info is not None and refusal.info.reason != reason.name
            if refusal.code is not reason.code or wrong:
                raise RuleBrokenError(f"{refusal}; must end with {reason.code.name} ({reason.name})") from refusal
            return refusal
        raise RuleBrokenError(f"{method} was answered; must end with {reason.code.name} ({reason.name})")

    async def invalid(self, method: str, *requests: Message, fields: Sequence[str]) -> RefusedError:
        """A call that must end with INVALID_ARGUMENT and name `fields`. Raises RuleBrokenError."""
        refusal = await self.refused(method, *requests, reason=Reason.INVALID_REQUEST)
        if refusal.status is not None and (missing := [name for name in fields if name not in refusal.fields]):
            named = ", ".join(refusal.fields) or "none"
            raise RuleBrokenError(f"{method} with a bad {', '.join(missing)} names {named} in BadRequest")
        return refusal


Check = Callable[[Probe], Awaitable[None]]
CHECKS: dict[str, Check] = {}
"""By the rule's id."""


def checks(rule: str) -> Callable[[Check], Check]:
    """Registers a function that returns, or raises RuleBrokenError or NotCheckedError."""

    def add(check: Check) -> Check:
        CHECKS[rule] = check
        return check

    return add


def must(holds: bool, found: str) -> None:
    """Raises RuleBrokenError unless it holds."""
    if not holds:
        raise RuleBrokenError(found)


def broken_by(error: MeshError) -> NoReturn:
    """For errors of our own reader of a message."""
    raise RuleBrokenError(str(error)) from error


async def open_probe(address: str, service: str, *, credentials: Credentials, deadline_s: float, full: bool) -> Probe:
    """Raises TimeoutError where nothing speaks gRPC."""
    options = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", 2**20),  # an error that is too long shall be seen
        ("grpc.absolute_max_metadata_size", 2**20),
        ("grpc.enable_http_proxy", 0),
    ]
    role = CLIENTS[SERVICES[service].full_name].server_role
    channel = credentials.open_channel(address, options, role)
    try:
        await asyncio.wait_for(channel.channel_ready(), deadline_s)
    except TimeoutError:
        await channel.close()
        raise
    return Probe(
        address=address, service=service, channel=channel, credentials=credentials, deadline_s=deadline_s, full=full
    )
