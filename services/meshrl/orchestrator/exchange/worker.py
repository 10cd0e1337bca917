"""One worker that dialled in, with the methods of a client of a RolloutService.

Its calls outlive its streams: while it is away they wait for as long as its lease. Then they fail as those of a service
that is gone.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp
from loguru import logger

from meshrl.core.waiting import set_within
from meshrl.orchestrator.exchange.config import ExchangeConfig
from meshrl.v1 import exchange_pb2 as pb
from meshrl.v1 import rollout_pb2
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import (
    CONTRACT_VERSION,
    EnvironmentInfo,
    RolloutEvent,
    RolloutRequest,
    RolloutStatus,
    RolloutSummary,
)

SILENT_HEARTBEATS = 3
MARGIN_S = 15.0
"""Of a group, beyond the deadline of its request."""

PREFIX = "exchange/"
"""Before a worker's name, in place of an address."""


class WorkerStream:
    def __init__(self) -> None:
        self.down: asyncio.Queue[pb.AttachResponse | None] = asyncio.Queue()
        self.closed_for: MeshError | None = None

    def send(self, message: pb.AttachResponse) -> None:
        if self.closed_for is None:
            self.down.put_nowait(message)

    def close(self, why: MeshError) -> None:
        if self.closed_for is None:
            self.closed_for = why
            self.down.put_nowait(None)


EventT = TypeVar("EventT")


@dataclass(eq=False)
class OpenCall(Generic[EventT]):
    """One group at a worker. `received` and `taken` count events."""

    call_id: str
    request: RolloutRequest
    received: int = 0
    taken: int = 0
    waiting: deque[EventT] = field(default_factory=deque)
    """Received, not taken; the first has the number taken + 1."""
    news: asyncio.Event = field(default_factory=asyncio.Event)


class CallBook(Generic[EventT]):
    """The calls of one worker, which may send `window` events before they are taken."""

    def __init__(self, window: int) -> None:
        self.calls: dict[str, OpenCall[EventT]] = {}
        self._window = window

    @property
    def credit(self) -> int:
        return max(0, self._window - sum(len(call.waiting) for call in self.calls.values()))

    def begin(self, request: RolloutRequest) -> OpenCall[EventT]:
        call = OpenCall[EventT](str(uuid.uuid4()), request)
        self.calls[call.call_id] = call
        return call

    def receive(self, call_id: str, seq: int, event: EventT) -> bool:
        """Returns False for an event received before, or of a call that is over. Raises INVALID_REQUEST for one that
        does not follow the last."""
        call = self.calls.get(call_id)
        if call is None or seq <= call.received:
            return False
        if seq != call.received + 1:
            what = f"event {seq} of call {call_id} came after event {call.received}"
            raise MeshError(Reason.INVALID_REQUEST, f"{what}; an event follows the one before it")
        call.received = seq
        call.waiting.append(event)
        call.news.set()
        return True

    def take(self, call: OpenCall[EventT]) -> int:
        """The caller has booked the first waiting event; returns its number."""
        call.waiting.popleft()
        call.taken += 1
        return call.taken

    def end(self, call_id: str) -> OpenCall[EventT] | None:
        return self.calls.pop(call_id, None)

    def cursors(self, held: Iterable[str]) -> Mapping[str, int]:
        """The next event of each wanted call that a returning worker holds."""
        return {call_id: self.calls[call_id].taken + 1 for call_id in held if call_id in self.calls}

    def missing(self, held: Iterable[str]) -> tuple[list[OpenCall[EventT]], list[OpenCall[EventT]]]:
        """Calls that such a worker lacks: those to start again, and those of which it has lost a part."""
        known = set(held)
        gone = [call for call in self.calls.values() if call.call_id not in known]
        return [call for call in gone if not call.received], [call for call in gone if call.received]


class DialedInWorker:
    def __init__(self, name: str, config: ExchangeConfig) -> None:
        self.name = name
        self.address = PREFIX + name
        self.owner = ""
        self.incarnation = ""
        self._contract_version = ""
        self.attachments = 0
        self._config = config
        self._stream: WorkerStream | None = None
        self._heard_s = time.monotonic()
        self._room = 0
        self._environments: tuple[EnvironmentInfo, ...] = ()
        self._status: RolloutStatus  # of the hello, and of each heartbeat
        self._book: CallBook[pb.CallEvent | MeshError] = CallBook(config.window)

    # --- its streams ------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        return self._stream is not None

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard_s

    def attach(self, hello: pb.WorkerHello) -> WorkerStream:
        """A new stream in place of the one before; its first message is the lease."""
        if self._stream is not None:
            self._stream.close(MeshError(Reason.CANCELLED, f"worker {self.name!r} has opened another stream"))
        stream = self._stream = WorkerStream()
        self.incarnation, self._contract_version = hello.incarnation, hello.contract_version
        self.attachments += 1
        self._environments = tuple(convert.from_proto(EnvironmentInfo, one) for one in hello.environments)
        self._note_status(hello.status, hello.room)
        held = [call.call_id for call in hello.calls]
        again, lost = self._book.missing(held)
        lease = pb.WorkerLease(
            contract_version=CONTRACT_VERSION,
            lease_s=self._config.lease_s,
            heartbeat_s=self._config.heartbeat_s,
            credit=self._book.credit,
            calls=[pb.CallCursor(call_id=one, next_seq=seq) for one, seq in self._book.cursors(held).items()],
        )
        stream.send(pb.AttachResponse(lease=lease))
        for call in lost:
            self._fail(call, MeshError(Reason.UNREACHABLE, f"{self.address} has lost what it made of the group"))
        for call in again:
            self._start(call)
        return stream

    def detach(self, stream: WorkerStream) -> None:
        if self._stream is stream:
            self._stream = None

    def take_in(self, message: pb.AttachRequest, stream: WorkerStream) -> None:
        """Raises INVALID_REQUEST for a message that breaks the contract."""
        self._heard_s = time.monotonic()
        match message.WhichOneof("message"):
            case "heartbeat":
                self._note_status(message.heartbeat.status, message.heartbeat.room)
                answer = pb.HeartbeatAnswer(number=message.heartbeat.number)
                stream.send(pb.AttachResponse(answer=answer))
            case "event" if message.event.call_id not in self._book.calls:  # its lease ran out, or nobody waits for it
                stream.send(pb.AttachResponse(ack=pb.EventAck(call_id=message.event.call_id, unneeded=True)))
                stream.send(pb.AttachResponse(credit=pb.EventCredit(events=1)))
            case "event":
                event = message.event
                if not self._book.receive(event.call_id, event.seq, event):
                    stream.send(pb.AttachResponse(credit=pb.EventCredit(events=1)))
            case "hello":
                raise MeshError(Reason.INVALID_REQUEST, "hello must be the first message of a stream, and no other")
            case _:  # of a newer contract
                pass

    def check_silence(self) -> None:
        """Called every second: ends a silent stream, and the lease of a worker that stays away."""
        silent_s = self.silent_s
        if self._stream is not None and silent_s > SILENT_HEARTBEATS * self._config.heartbeat_s:
            self._stream.close(MeshError(Reason.UNREACHABLE, f"nothing was heard for {silent_s:.0f} s"))
            self.detach(self._stream)
        if self._stream is None and silent_s > self._config.lease_s and self._book.calls:
            logger.warning(
                f"the lease of worker {self.name!r} has run out after {silent_s:.0f} s:"
                f" {len(self._book.calls)} groups are given to others"
            )
            for call in list(self._book.calls.values()):
                self._fail(call, MeshError(Reason.UNREACHABLE, f"{self.address} stayed away for its whole lease"))

    def to_proto(self, left_out: str) -> pb.AttachedWorker:
        return pb.AttachedWorker(
            worker=self.name,
            attached=self.attached,
            silent_s=self.silent_s,
            calls=len(self._book.calls),
            environments=[info.name for info in self._environments],
            status=convert.to_proto(self._status),
            attachments=self.attachments,
            left_out=left_out,
            last_seen_time=Timestamp(seconds=int(time.time() - self.silent_s)),
        )

    def _note_status(self, status: rollout_pb2.GetRolloutStatusResponse, room: int) -> None:
        self._heard_s = time.monotonic()
        self._status, self._room = convert.from_proto(RolloutStatus, status), room

    # --- its calls --------------------------------------------------------------------------------

    def _start(self, call: OpenCall[pb.CallEvent | MeshError]) -> None:
        if self._stream is not None:
            start = pb.StartCall(call_id=call.call_id, request=convert.to_proto(call.request))
            self._stream.send(pb.AttachResponse(start=start))

    def _fail(self, call: OpenCall[pb.CallEvent | MeshError], error: MeshError) -> None:
        """The caller gets the events received so far, and then the error."""
        self._book.end(call.call_id)
        call.waiting.append(error)
        call.news.set()

    def _acknowledge(self, call: OpenCall[pb.CallEvent | MeshError]) -> None:
        seq = self._book.take(call)
        if self._stream is not None and call.call_id in self._book.calls:
            self._stream.send(pb.AttachResponse(ack=pb.EventAck(call_id=call.call_id, seq=seq)))
            self._stream.send(pb.AttachResponse(credit=pb.EventCredit(events=1)))

    # --- as a client of a RolloutService ----------------------------------------------------------

    async def wait_until_serving(self, deadline_s: float, on_wait: Callable[[str], None] = lambda why: None) -> None:
        """Returns at once: a known worker has dialled in."""
        if why := await self.why_not_serving(deadline_s):
            on_wait(why)
            raise MeshError(Reason.UNREACHABLE, why)

    async def why_not_serving(self, deadline_s: float) -> str:
        if self.attached:
            return ""
        left_s = max(0.0, self._config.lease_s - self.silent_s)
        return f"its link broke, or it has left; nothing was heard for {self.silent_s:.0f} s, its lease: {left_s:.0f} s"

    async def list_environments(self, deadline_s: float | None = None) -> tuple[EnvironmentInfo, ...]:
        return self._environments

    async def get_status(self, deadline_s: float | None = None) -> RolloutStatus:
        return self._status

    async def run_rollouts(self, request: RolloutRequest) -> AsyncGenerator[RolloutEvent, None]:
        """As `RolloutClient`; each event that the caller has come back for is acknowledged. Raises MeshError: the
        worker's own refusal, OVERLOADED while it has no room, UNREACHABLE when it is away."""
        if self._stream is None:
            raise MeshError(Reason.UNREACHABLE, f"{self.address} is away: {await self.why_not_serving(0.0)}")
        if request.group_size > self._room:
            raise MeshError(
                Reason.OVERLOADED, f"{self.address} has room for {self._room} rollouts now", retry_after_s=1.0
            )
        self._room -= request.group_size
        call = self._book.begin(request)
        self._start(call)
        summary: RolloutSummary | None = None
        reader = convert.RolloutReader(self._contract_version)
        try:
            end_s = time.monotonic() + request.deadline_s + MARGIN_S
            while True:
                event = await self._next(call, end_s)
                if isinstance(event, MeshError):
                    raise event
                if event.WhichOneof("event") == "end":
                    self._acknowledge(call)
                    self._book.end(call.call_id)
                    break
                parsed = reader.read(event.result)
                if isinstance(parsed, RolloutSummary):
                    summary = parsed
                elif parsed is not None:
                    yield parsed
                self._acknowledge(call)
        finally:
            # Nobody waits for the call any more; one that is not over is stopped at the worker.
            if self._book.end(call.call_id) is not None and self._stream is not None:
                unbooked = len(call.waiting)
                self._stream.send(pb.AttachResponse(ack=pb.EventAck(call_id=call.call_id, unneeded=True)))
                if unbooked:
                    self._stream.send(pb.AttachResponse(credit=pb.EventCredit(events=unbooked)))
        if event.end.reason:
            reason = Reason.__members__.get(event.end.reason, Reason.INTERNAL)
            raise MeshError(reason, event.end.message, retry_after_s=event.end.retry_after_s or None)
        if summary is None:
            raise MeshError(Reason.UNREACHABLE, f"the call of group {request.group_id} ended before its summary")
        yield summary

    async def cancel_rollouts(self, group_ids: Sequence[str] = ()) -> int:
        """Stops the groups named, or all. Returns how many rollouts had not ended."""
        stopped = 0
        for call in self._book.calls.values():
            if self._stream is not None and (not group_ids or call.request.group_id in group_ids):
                self._stream.send(pb.AttachResponse(cancel=pb.CancelCall(call_id=call.call_id)))
                stopped += max(0, call.request.group_size - call.received)
        return stopped

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.close(MeshError(Reason.DRAINING, "the run ends"))

    async def _next(self, call: OpenCall[pb.CallEvent | MeshError], end_s: float) -> pb.CallEvent | MeshError:
        while not call.waiting:
            call.news.clear()
            if not await set_within(call.news, max(0.0, end_s - time.monotonic())):
                raise MeshError(Reason.DEADLINE_PASSED, f"{self.address} did not end the group in time")
        return call.waiting[0]
