"""Checks of a rollout worker: this side plays the orchestrator's RolloutExchange.

Groups that a worker must refuse stand in for work, so no engine is needed; --full plays a group as well. Each check but
the first has a fresh stream, with no calls and ample credit.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from meshrl.client.credentials import INSECURE, Credentials
from meshrl.v1 import exchange_pb2 as pb
from meshrl.v1 import exchange_pb2_grpc as pb_grpc
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import CONTRACT_VERSION
from meshrl.wire.validate import check
from meshrl_conformance.probe import MAX_MESSAGE_BYTES, NotCheckedError, broken_by, must
from meshrl_conformance.rollout import NO_ENVIRONMENT, small_group

HEARTBEAT_S, LEASE_S = 1.0, 600.0
MISSING_BEATS = 3
QUIET_S = 1.5  # in which a worker would have said what it must not say
ENOUGH = 1000  # credit for whatever a check asks for

WORKER_RULES = {
    "exchange.hello": "Send `hello` first, with the same name at every start and every call of which it has something,"
    " and nothing else before `lease`.",
    "exchange.refusal": "Refuse a group as `RunRollouts` would, by `end` with that reason.",
    "exchange.credit": "Send no more events on a stream than `lease.credit` and the `credit` messages have granted on"
    " it; hello and heartbeats cost none.",
    "exchange.once": "Play a `start` whose `call_id` it knows no second time.",
    "exchange.resume": "After `lease`, drop the calls that it does not list, and send those that it lists again from"
    " `next_seq`, in order.",
    "exchange.numbers": "Number the events of a call 1, 2, 3 and so on, over all streams and processes; the last one is"
    " `end`.",
    "exchange.cancel": "After `cancel` end the call with its summary, as after `CancelRollouts`; after `unneeded` stop"
    " it and send nothing more of it.",
    "exchange.heartbeat": "Send a heartbeat every `lease.heartbeat_s`, and at once when it begins to drain; dial anew"
    " once nothing came for three of them.",
    "exchange.spool": "Write an event to the spool before it is sent, and keep it until an `ack` of its number, or one"
    " with `unneeded`.",
    "exchange.cut-off": "End a call that an earlier process played with `end`, reason UNREACHABLE, numbered after its"
    " last event and at least `next_seq`.",
}
"""The sentences of docs/contract.md, in the order of the checks."""


class Attached:
    """One stream of a worker."""

    def __init__(self) -> None:
        self.hello = pb.WorkerHello()
        self.first = ""  # what the first message was
        self.granted = False  # a lease
        self.answers = True  # heartbeats
        self.beats: list[tuple[float, int]] = []  # when each came, and its number
        self.down: asyncio.Queue[pb.AttachResponse | None] = asyncio.Queue()
        self.over = asyncio.Event()
        self._events: asyncio.Queue[pb.CallEvent] = asyncio.Queue()

    async def read(self, messages: AsyncIterator[pb.AttachRequest]) -> None:
        """To the end of the stream."""
        loop = asyncio.get_running_loop()
        try:
            async for message in messages:
                match message.WhichOneof("message"):
                    case "event":
                        self._events.put_nowait(message.event)
                    case "heartbeat":
                        self.beats.append((loop.time(), message.heartbeat.number))
                        if self.answers:
                            self.send(answer=pb.HeartbeatAnswer(number=message.heartbeat.number))
        finally:
            self.over.set()
            self.down.put_nowait(None)

    def send(self, **message: Any) -> None:
        self.down.put_nowait(pb.AttachResponse(**message))

    def grant(self, credit: int, calls: dict[str, int]) -> None:
        """The lease; `calls` are the next numbers of those that go on."""
        cursors = [pb.CallCursor(call_id=call_id, next_seq=next_seq) for call_id, next_seq in calls.items()]
        lease = pb.WorkerLease(
            contract_version=CONTRACT_VERSION, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, credit=credit, calls=cursors
        )
        self.granted = True
        self.send(lease=lease)

    async def event(self, within_s: float) -> pb.CallEvent | None:
        """None where none comes."""
        try:
            return await asyncio.wait_for(self._events.get(), within_s)
        except TimeoutError:
            return None

    def said(self) -> int:
        """Events that nobody has looked at."""
        return self._events.qsize()


class WorkerProbe:
    """The exchange as the worker sees it, and its present `stream`."""

    def __init__(self, *, deadline_s: float, full: bool) -> None:
        self.deadline_s, self.full = deadline_s, full
        self.dialled: asyncio.Queue[Attached] = asyncio.Queue()
        self.stream = Attached()
        self.credit = 0

    async def attached(self) -> Attached:
        """The worker's next stream, after its hello. Raises TimeoutError."""
        self.stream = await asyncio.wait_for(self.dialled.get(), self.deadline_s)
        return self.stream

    async def again(self, credit: int, calls: dict[str, int]) -> Attached:
        """Ends the stream, and goes on over the worker's next."""
        self.stream.down.put_nowait(None)
        before = self.stream.hello.worker
        stream = await self.attached()
        must(stream.hello.worker == before, f"it dialled in as {stream.hello.worker!r}, before as {before!r}")
        stream.grant(credit, calls)
        return stream

    async def next_stream(self) -> None:
        """With credit and all calls forgotten. Raises TimeoutError."""
        if self.stream.granted:
            await self.again(ENOUGH, {})
        else:
            self.stream.grant(ENOUGH, {})

    def refused_call(self) -> str:
        """Starts a group that every worker must refuse. Returns the call's id."""
        return self.start(NO_ENVIRONMENT)

    def start(self, environment: str = "") -> str:
        """By default of the worker's first environment. Returns the call's id."""
        call_id = str(uuid.uuid4())
        environment = environment or self.stream.hello.environments[0].name
        request = small_group(environment=environment, deadline_s=self.deadline_s)
        self.stream.send(start=pb.StartCall(call_id=call_id, request=request))
        return call_id

    async def end_of(self, call_id: str) -> list[pb.CallEvent]:
        """The call's events up to its end, acknowledged. Raises RuleBrokenError without an end."""
        events: list[pb.CallEvent] = []
        while not events or not events[-1].HasField("end"):
            event = await self.stream.event(self.deadline_s)
            must(event is not None, f"after {len(events)} events of a group nothing came for {self.deadline_s:g} s")
            assert event is not None
            if event.call_id == call_id:
                events.append(event)
        self.acknowledge(call_id, events[-1].seq)
        return events

    def acknowledge(self, call_id: str, seq: int) -> None:
        self.stream.send(ack=pb.EventAck(call_id=call_id, seq=seq))

    async def quiet(self, what: str) -> None:
        """No event comes. Raises RuleBrokenError."""
        event = await self.stream.event(QUIET_S)
        must(event is None, f"{what}: event {event.seq if event is not None else 0} of a call came")


WorkerCheck = Callable[[WorkerProbe], Awaitable[None]]


async def _hello(probe: WorkerProbe) -> None:
    stream = probe.stream
    must(stream.first == "hello", f"its first message is {stream.first or 'none'}")
    try:
        check(stream.hello)
    except MeshError as error:
        broken_by(error)
    await asyncio.sleep(QUIET_S)
    must(not stream.said() and not stream.beats, "it goes on before it has a lease")


async def _refusal(probe: WorkerProbe) -> None:
    (*results, last) = await probe.end_of(probe.refused_call())
    must(not results, "a group of an environment that it does not host has results")
    wanted = Reason.UNKNOWN_ENVIRONMENT.name
    must(last.end.reason == wanted, f"it refuses an unknown environment with {last.end.reason or 'no reason'}")


async def _credit(probe: WorkerProbe) -> None:
    await probe.again(1, {})
    calls = [probe.refused_call() for _ in range(2)]
    first = await probe.stream.event(probe.deadline_s)
    must(first is not None, "with a credit of 1 no event came")
    await probe.quiet("beyond a credit of 1")
    probe.stream.send(credit=pb.EventCredit(events=ENOUGH))
    second = await probe.stream.event(probe.deadline_s)
    must(second is not None, "the event that waited did not come with more credit")
    for call_id in calls:
        probe.acknowledge(call_id, 1)


async def _once(probe: WorkerProbe) -> None:
    call_id = probe.refused_call()
    must(await probe.stream.event(probe.deadline_s) is not None, "a group that it must refuse has no end")
    request = small_group(environment=NO_ENVIRONMENT, deadline_s=probe.deadline_s)
    probe.stream.send(start=pb.StartCall(call_id=call_id, request=request))
    await probe.quiet("a call that it has ended was started again")
    probe.acknowledge(call_id, 1)


async def _resume(probe: WorkerProbe) -> None:
    wanted, dropped = probe.refused_call(), probe.refused_call()
    for _ in range(2):
        must(await probe.stream.event(probe.deadline_s) is not None, "a group that it must refuse has no end")
    stream = await probe.again(ENOUGH, {wanted: 1})
    held = {call.call_id for call in stream.hello.calls}
    must({wanted, dropped} <= held, "its hello does not tell of a call whose events nobody has acknowledged")
    event = await stream.event(probe.deadline_s)
    must(event is not None, "an event that was not acknowledged did not come again")
    assert event is not None
    named = "that was dropped" if event.call_id == dropped else "that goes on"
    must((event.call_id, event.seq) == (wanted, 1), f"event {event.seq} of the call {named} came first")
    await probe.quiet("the call that the lease does not list goes on")
    probe.acknowledge(wanted, 1)
    await asyncio.sleep(QUIET_S)  # acknowledgements have arrived
    stream = await probe.again(ENOUGH, {})
    left = [call.call_id for call in stream.hello.calls if call.call_id in (wanted, dropped)]
    must(not left, "its hello tells of a call that is over, or was dropped")


async def _numbers(probe: WorkerProbe) -> None:
    events = await probe.end_of(probe.start() if probe.full else probe.refused_call())
    numbers = [event.seq for event in events]
    must(numbers == list(range(1, len(numbers) + 1)), f"the events of a call are numbered {numbers}")
    if probe.full and events[-1].end.reason:
        raise NotCheckedError(f"a group was refused: {events[-1].end.reason}: {events[-1].end.message}")


async def _cancel(probe: WorkerProbe) -> None:
    stream = await probe.again(0, {})
    call_id = probe.refused_call()
    stream.send(ack=pb.EventAck(call_id=call_id, unneeded=True))
    await asyncio.sleep(QUIET_S)
    stream.send(credit=pb.EventCredit(events=ENOUGH))
    await probe.quiet("after unneeded")
    if not probe.full:
        raise NotCheckedError("after unneeded it is silent, as it must be; --full cancels a group that is played")
    call_id = probe.start()
    stream.send(cancel=pb.CancelCall(call_id=call_id))
    (*results, last) = await probe.end_of(call_id)
    if last.end.reason:
        raise NotCheckedError(f"a group was refused: {last.end.reason}: {last.end.message}")
    kinds = [event.result.WhichOneof("event") for event in results]
    must(kinds[-1:] == ["summary"], f"a group that was cancelled ends with {', '.join(map(str, kinds)) or 'nothing'}")


async def _heartbeat(probe: WorkerProbe) -> None:
    stream = probe.stream
    await asyncio.sleep(4 * HEARTBEAT_S)
    numbers = [number for _, number in stream.beats]
    must(len(numbers) >= 2, f"in four heartbeats' time {len(numbers)} came")
    must(all(b == a + 1 for a, b in itertools.pairwise(numbers)), f"heartbeats are numbered {numbers}")
    stream.answers = False
    try:
        await asyncio.wait_for(stream.over.wait(), MISSING_BEATS * HEARTBEAT_S + probe.deadline_s)
        await probe.attached()
    except TimeoutError:
        must(False, f"it did not dial anew within {probe.deadline_s:g} s of three heartbeats without an answer")
    probe.stream.grant(ENOUGH, {})


async def _not_seen(probe: WorkerProbe) -> None:
    raise NotCheckedError("its disk cannot be seen from here; exchange.resume checks what comes of it")


async def _not_restarted(probe: WorkerProbe) -> None:
    raise NotCheckedError("the worker would have to be killed while it plays, and started again")


WORKER_CHECKS: dict[str, WorkerCheck] = {
    "exchange.hello": _hello,
    "exchange.refusal": _refusal,
    "exchange.credit": _credit,
    "exchange.once": _once,
    "exchange.resume": _resume,
    "exchange.numbers": _numbers,
    "exchange.cancel": _cancel,
    "exchange.heartbeat": _heartbeat,
    "exchange.spool": _not_seen,
    "exchange.cut-off": _not_restarted,
}


class _Exchange(pb_grpc.RolloutExchangeServicer):
    """Streams go to the probe."""

    def __init__(self, probe: WorkerProbe) -> None:
        self._probe = probe

    async def Attach(  # noqa: N802  # the name of the RPC
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Any
    ) -> AsyncIterator[pb.AttachResponse]:
        messages, stream = aiter(request_iterator), Attached()
        first = await anext(messages, None)
        if first is not None:
            stream.first, stream.hello = str(first.WhichOneof("message")), first.hello
        self._probe.dialled.put_nowait(stream)
        reading = asyncio.create_task(stream.read(messages))
        try:
            while (message := await stream.down.get()) is not None:
                yield message
        finally:
            reading.cancel()
            stream.over.set()


@asynccontextmanager
async def waiting_for_worker(
    address: str, *, deadline_s: float, full: bool, credentials: Credentials = INSECURE
) -> AsyncIterator[WorkerProbe]:
    """Listens at `address`. Raises TimeoutError where no worker dials in, RuntimeError where it cannot listen."""
    probe = WorkerProbe(deadline_s=deadline_s, full=full)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)])
    pb_grpc.add_RolloutExchangeServicer_to_server(_Exchange(probe), server)  # type: ignore[no-untyped-call]  # generated
    credentials.add_port(server, address)
    await server.start()
    try:
        await probe.attached()
        yield probe
    finally:
        await server.stop(0.0)
