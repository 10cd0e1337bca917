"""A worker's side of RolloutExchange: dials the orchestrator, plays the groups that it is given, reports the results.

Events go into the spool, then wait for credit to go on the stream.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, closing

from loguru import logger

from meshrl.client.backoff import AWAY_S, Backoff
from meshrl.client.channel import ChannelOptions
from meshrl.client.exchange import ExchangeClient
from meshrl.core.telemetry.waits import CountedWait
from meshrl.core.waiting import Pulse, set_within
from meshrl.rollout.config import ExchangeLinkConfig
from meshrl.rollout.exchange.outbox import Outbox, SpooledEvent
from meshrl.rollout.exchange.spool import ResultSpool
from meshrl.rollout.runner import RolloutRunner
from meshrl.v1 import exchange_pb2 as pb
from meshrl.v1 import rollout_pb2
from meshrl.wire import convert, validate
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import CONTRACT_VERSION, RolloutRequest

FIRST_ANSWER_S = 30.0
"""Seconds for the orchestrator to name its terms."""

LOOK_S = 0.5

SILENT_HEARTBEATS = 3
"""Missing ones after which a stream is dead."""

_FATAL = frozenset({Reason.CONTRACT_MISMATCH, Reason.INVALID_REQUEST, Reason.NOT_SUPPORTED})
_REFUSED = frozenset({Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED})


class _Stream:
    """`terms` is set once the lease has come; only then is more than hello sent."""

    def __init__(self) -> None:
        self.terms = asyncio.Event()
        self.heartbeat_s = 1.0
        self.credit = 0
        self.is_over = False

    def close(self) -> None:
        """Sends nothing more: gRPC asks for the next message of an ended call, too, and drops it."""
        self.is_over = True
        self.terms.set()


class ExchangeWorker:
    """`max_queued`: rollouts that wait beyond the running ones."""

    def __init__(
        self,
        config: ExchangeLinkConfig,
        runner: RolloutRunner,
        spool: ResultSpool,
        *,
        name: str,
        max_queued: int,
        options: ChannelOptions | None = None,
    ) -> None:
        self.name = name
        self.attached = asyncio.Event()
        self._config = config
        self._runner = runner
        self._spool = spool
        self._max_queued = max_queued
        self._options = options
        self._incarnation = str(uuid.uuid4())
        self._outbox = Outbox(spool.read())
        self._playing: dict[str, tuple[str, asyncio.Task[None]]] = {}  # (group_id, task) by call
        self._unwritten: list[SpooledEvent] = []
        self._forget: list[tuple[str, int | None]] = []
        self._to_write = asyncio.Event()
        self._changed = Pulse()
        self._beat_now = False
        self._beats = 0
        self._heard_s = time.monotonic()
        self._away_since_s = time.time()
        self._lease_s: float | None = None
        if left := len(self._outbox.calls):
            logger.info("{} groups of an earlier process are in the spool {}", left, spool.path)

    # --- the life of a worker ---------------------------------------------------------------------

    async def run(self) -> None:
        """Raises MeshError if another attempt will not help, or the spool fails."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write())
                tasks.create_task(self._dial_forever())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            for _, task in list(self._playing.values()):
                task.cancel()

    def beat_now(self) -> None:
        self._beat_now = True
        self._changed.beat()

    def waits(self) -> Iterator[CountedWait]:
        if not self.attached.is_set():
            yield CountedWait(
                self._incarnation, "exchange", (self._config.address,), self._away_since_s, "orchestrator to be dialled"
            )

    async def delivered(self, deadline_s: float) -> None:
        """Logs results that are not acknowledged in time."""
        try:
            async with asyncio.timeout(deadline_s):
                while not self._outbox.is_empty:
                    await self._changed.next()
        except TimeoutError:
            held = len(self._outbox.calls)
            logger.warning("{} groups are not acknowledged; they stay in the spool {}", held, self._spool.path)

    async def _dial_forever(self) -> None:
        backoff, told, has_attached = Backoff(*AWAY_S), "", False
        while True:
            try:
                await self._attach(backoff)
                why = "the orchestrator ended the stream"
            except MeshError as error:
                if error.reason in _FATAL or (error.reason in _REFUSED and not has_attached):
                    raise
                why = str(error)
            was_attached = self.attached.is_set()
            has_attached = has_attached or was_attached
            self.attached.clear()
            if was_attached:
                self._away_since_s = time.time()
            if was_attached or why != told:
                logger.warning("not attached to the orchestrator at {}: {}; dialling again", self._config.address, why)
            told = why
            if self._lease_s is not None and time.monotonic() - self._heard_s > self._lease_s:
                self._give_up_calls()
            await asyncio.sleep(backoff.next_s())

    def _give_up_calls(self) -> None:
        if self._playing:
            logger.warning("{} groups are stopped: their lease has run out", len(self._playing))
        for call_id, (_, task) in list(self._playing.items()):
            task.cancel()
            del self._playing[call_id]
            self._end(call_id, MeshError(Reason.UNREACHABLE, f"worker {self.name} had no link for its whole lease"))

    async def _attach(self, backoff: Backoff) -> None:
        async with AsyncExitStack() as stack:
            stream = stack.enter_context(closing(_Stream()))
            client = await stack.enter_async_context(ExchangeClient(self._config.address, self._options))
            answers = await stack.enter_async_context(aclosing(client.attach(self._messages(stream))))
            limit_s = FIRST_ANSWER_S
            while True:
                try:
                    async with asyncio.timeout(limit_s):
                        answer = await anext(answers, None)
                except TimeoutError:
                    raise MeshError(Reason.UNREACHABLE, f"nothing was heard for {limit_s:g} s") from None
                if answer is None:
                    return
                self._heard_s = time.monotonic()
                self._handle(stream, answer)
                if not stream.terms.is_set():
                    raise MeshError(Reason.INVALID_REQUEST, "the orchestrator's first message was no lease")
                limit_s = SILENT_HEARTBEATS * stream.heartbeat_s
                if not self.attached.is_set():
                    self.attached.set()
                    backoff.reset()
                    logger.info("attached to the orchestrator at {} as {!r}", self._config.address, self.name)

    # --- what goes up -----------------------------------------------------------------------------

    async def _messages(self, stream: _Stream) -> AsyncGenerator[pb.AttachRequest | bytes, None]:
        yield pb.AttachRequest(hello=self._hello())
        await stream.terms.wait()
        next_beat_s = time.monotonic() + stream.heartbeat_s
        told = self._versions()
        while not stream.is_over:
            upcoming = self._changed.upcoming
            if self._beat_now or time.monotonic() >= next_beat_s:
                self._beat_now, next_beat_s = False, time.monotonic() + stream.heartbeat_s
                self._beats += 1
                status = convert.to_proto(self._runner.status())
                yield pb.AttachRequest(
                    heartbeat=pb.WorkerHeartbeat(number=self._beats, status=status, room=self._room())
                )
            event = self._outbox.next_event() if stream.credit > 0 else None
            if event is not None:
                stream.credit -= 1
                yield event.message
                continue
            await set_within(upcoming, max(0.0, min(next_beat_s - time.monotonic(), LOOK_S)))
            if (now := self._versions()) != told:  # whoever waits for a version learns of it at once
                told, self._beat_now = now, True

    def _versions(self) -> frozenset[int | None]:
        return frozenset(engine.version for engine in self._runner.status().engines if engine.healthy)

    def _hello(self) -> pb.WorkerHello:
        infos = [player.info for player in self._runner.environments.values()]
        return pb.WorkerHello(
            contract_version=CONTRACT_VERSION,
            worker=self.name,
            incarnation=self._incarnation,
            environments=[convert.to_proto(info) for info in infos],
            status=convert.to_proto(self._runner.status()),
            room=self._room(),
            calls=[
                pb.HeldCall(call_id=call.call_id, last_seq=call.last_seq, playing=call.playing)
                for call in self._outbox.calls
            ],
        )

    def _room(self) -> int:
        status = self._runner.status()
        if status.draining or self._outbox.held_bytes >= self._config.spool_max_mib * 2**20:
            return 0
        return max(0, (status.max_concurrent or 0) + self._max_queued - status.running - status.queued)

    # --- what comes down --------------------------------------------------------------------------

    def _handle(self, stream: _Stream, answer: pb.AttachResponse) -> None:
        match answer.WhichOneof("message"):
            case "lease":
                self._resume(stream, answer.lease)
            case "start":
                self._start(answer.start)
            case "cancel" if answer.cancel.call_id in self._playing:
                self._runner.cancel((self._playing[answer.cancel.call_id][0],))
            case "ack":
                if answer.ack.unneeded:
                    self._drop(answer.ack.call_id)
                else:
                    self._outbox.acknowledge(answer.ack.call_id, answer.ack.seq)
                    self._forget.append((answer.ack.call_id, answer.ack.seq))
                self._to_write.set()
                self._changed.beat()
            case "credit":
                stream.credit += answer.credit.events
                self._changed.beat()
            case _:  # the answer to a heartbeat, or something of a newer contract: it was heard, which is all
                pass

    def _resume(self, stream: _Stream, lease: pb.WorkerLease) -> None:
        validate.validate_contract_version(lease.contract_version)
        stream.heartbeat_s, stream.credit = lease.heartbeat_s, lease.credit
        self._lease_s = lease.lease_s
        cursors = {cursor.call_id: cursor.next_seq for cursor in lease.calls}
        unneeded, cut_off = self._outbox.resume(cursors)
        for call_id in unneeded:
            self._drop(call_id)
        for call_id in cut_off:
            self._end(call_id, MeshError(Reason.UNREACHABLE, f"worker {self.name} was started anew"))
        self._forget += [(call_id, next_seq - 1) for call_id, next_seq in cursors.items()]
        self._to_write.set()
        stream.terms.set()
        self._changed.beat()

    def _drop(self, call_id: str) -> None:
        self._outbox.drop(call_id)
        self._forget.append((call_id, None))
        self._to_write.set()
        if call_id in self._playing:
            self._playing.pop(call_id)[1].cancel()

    # --- calls ------------------------------------------------------------------------------------

    def _start(self, start: pb.StartCall) -> None:
        if start.call_id in self._outbox:
            return
        self._outbox.begin(start.call_id)
        task = asyncio.create_task(self._play(start.call_id, start.request))
        self._playing[start.call_id] = (start.request.group_id, task)

    async def _play(self, call_id: str, request: rollout_pb2.RunRolloutsRequest) -> None:
        error: MeshError | None = None

        def emit(message: bytes) -> None:
            self._put(call_id, result=rollout_pb2.RunRolloutsResponse.FromString(message))

        try:
            validate.check(request)
            await self._runner.run(convert.from_proto(RolloutRequest, request), emit)
        except MeshError as refusal:  # told to whoever asked for the group
            error = refusal
        except Exception as defect:  # noqa: BLE001  # the boundary, as at a server: one group must not end the worker
            logger.opt(exception=defect).error("call {} failed", call_id)
            error = MeshError(Reason.INTERNAL, f"{type(defect).__name__}: {defect}")
        self._playing.pop(call_id, None)
        self._end(call_id, error)

    def _end(self, call_id: str, error: MeshError | None) -> None:
        end = pb.CallEnd()
        if error is not None:
            text = str(error) if error.violations else error.message
            end = pb.CallEnd(reason=error.reason.name, message=text, retry_after_s=error.retry_after_s or 0.0)
        self._put(call_id, end=end)

    def _put(
        self, call_id: str, *, result: rollout_pb2.RunRolloutsResponse | None = None, end: pb.CallEnd | None = None
    ) -> None:
        if call_id not in self._outbox:
            return
        seq = self._outbox.next_seq(call_id)
        message = pb.AttachRequest(event=pb.CallEvent(call_id=call_id, seq=seq, result=result, end=end))
        event = SpooledEvent(call_id, seq, message.SerializeToString(), end is not None)
        self._outbox.add(event)
        self._unwritten.append(event)
        self._to_write.set()

    async def _write(self) -> None:
        while True:
            await self._to_write.wait()
            self._to_write.clear()
            events, self._unwritten = self._unwritten, []
            forget, self._forget = self._forget, []
            try:
                await asyncio.to_thread(self._spool.write, events, forget)
            except (OSError, sqlite3.Error) as error:
                raise MeshError(
                    Reason.INTERNAL,
                    f"the spool {self._spool.path} cannot be written: {error}; free some space and start again",
                ) from error
            for event in events:
                self._outbox.stored(event)
            self._changed.beat()
