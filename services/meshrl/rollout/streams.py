"""Streams of groups that outlive their connection: events are numbered and kept, and a caller attaches again.

Events of a group with `linger_s` are kept until so long after its end, within `KEPT_BYTES` in all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from loguru import logger

from meshrl.core.waiting import Pulse
from meshrl.rollout.runner import Emit
from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import RolloutRequest

KEPT_BYTES = 256 * 2**20

Run = Callable[[RolloutRequest, Emit], Awaitable[None]]


class ResumableStreams:
    """By request id. Used from the server's event loop only."""

    def __init__(self, run: Run, *, most_bytes: int = KEPT_BYTES) -> None:
        self._run = run
        self._most_bytes = most_bytes
        self._bytes = 0
        self._streams: dict[str, _Stream] = {}

    async def follow(self, request: RolloutRequest) -> AsyncGenerator[bytes, None]:
        """Plays a group, or with `after_seq` attaches to it again, and yields its messages in order.

        Raises the errors of `RolloutRunner.run`; DUPLICATE_REQUEST for a known request_id without `after_seq` or with
        another group, REVISION_EXPIRED for messages behind `after_seq` that are gone, CANCELLED after another call
        attached.
        """
        for other in list(self._streams.values()):
            is_same = other.request.request_id == request.request_id
            if other.reader is None and other.request.group_id == request.group_id and not is_same:
                self._end(other)  # nobody is there for it, and its caller asks anew
                await other.task_over()
        stream = self._streams.get(request.request_id)
        if stream is None:
            if request.after_seq:
                raise _gone(request, "this server does not have the group, or no longer")
            stream = self._streams[request.request_id] = _Stream(request, self._run, self._count)
        elif request.after_seq is None or _identity(request) != _identity(stream.request):
            raise MeshError(
                Reason.DUPLICATE_REQUEST,
                f"request {request.request_id} was admitted before; set after_seq to attach to its group, or use a new"
                " request_id for new rollouts",
            )
        try:
            async with aclosing(stream.read(request.after_seq or 0)) as messages:
                async for message in messages:
                    yield message
        finally:
            if stream.reader is None:
                self._left(stream)

    def _left(self, stream: _Stream) -> None:
        if stream.request.linger_s <= 0 or stream.was_refused:
            self._end(stream)
        else:
            loop = asyncio.get_running_loop()
            stream.timer = loop.call_later(stream.request.linger_s, self._expire, stream)

    def _expire(self, stream: _Stream) -> None:
        if not stream.over:
            request = stream.request
            logger.bind(env=request.environment).warning(
                "group {} ends: nobody has attached to it again within {:g} s", request.group_id, request.linger_s
            )
        self._end(stream)

    def _end(self, stream: _Stream) -> None:
        if self._streams.get(stream.request.request_id) is stream:
            del self._streams[stream.request.request_id]
        stream.close()

    def _count(self, num_bytes: int) -> None:
        """Beyond the bound the oldest messages go that were sent, or have no reader."""
        self._bytes += num_bytes
        if num_bytes < 0 or self._bytes <= self._most_bytes:
            return
        for stream in list(self._streams.values()):
            while self._bytes > self._most_bytes and stream.drop_oldest():
                pass


class _Stream:
    def __init__(self, request: RolloutRequest, run: Run, count: Callable[[int], None]) -> None:
        self.request = request
        self.reader: object | None = None
        self.over = False
        self.timer: asyncio.TimerHandle | None = None
        self._count = count
        self._error: BaseException | None = None
        self._kept: deque[bytes] = deque()
        self._first = 1  # number of the first message in `_kept`
        self._sent = 0
        self._changed = Pulse()
        self._task = asyncio.create_task(self._play(run))

    @property
    def was_refused(self) -> bool:
        """Before its first message, so the same request may be made again."""
        return self._error is not None and self._first + len(self._kept) == 1

    async def _play(self, run: Run) -> None:
        try:
            await run(self.request, self._add)
        except Exception as error:  # noqa: BLE001  # raised where the stream is read
            self._error = error
        finally:
            self.over = True
            self._changed.beat()

    def _add(self, message: bytes) -> None:
        number = pb.RunRolloutsResponse(seq=self._first + len(self._kept))
        self._kept.append(message + number.SerializeToString())  # one more field, behind the others
        self._count(len(self._kept[-1]))
        self._changed.beat()

    async def read(self, after_seq: int) -> AsyncGenerator[bytes, None]:
        reader = self.reader = object()
        self._changed.beat()
        if self.timer is not None:
            self.timer.cancel()
        self._drop_to(after_seq)  # the caller has them
        seq = after_seq + 1
        try:
            while True:
                if self.reader is not reader:
                    raise MeshError(Reason.CANCELLED, f"another call has attached to group {self.request.group_id}")
                if not self._first <= seq <= self._first + len(self._kept):
                    raise _gone(self.request, f"this server keeps events {self._first} and later of it")
                if seq < self._first + len(self._kept):
                    yield self._kept[seq - self._first]
                    self._sent = max(self._sent, seq)
                    if self.request.linger_s <= 0:
                        self._drop_to(seq)
                    self._count(0)  # what was sent may go now
                    seq += 1
                elif self.over:
                    if self._error is not None:
                        raise self._error
                    return
                else:
                    await self._changed.next()
        finally:
            if self.reader is reader:
                self.reader = None

    def drop_oldest(self) -> bool:
        if not self._kept or (self.reader is not None and self._first > self._sent):
            return False
        self._drop_to(self._first)
        return True

    def _drop_to(self, seq: int) -> None:
        while self._kept and self._first <= seq:
            self._count(-len(self._kept.popleft()))
            self._first += 1

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self._task.cancel()
        self._drop_to(self._first + len(self._kept))

    async def task_over(self) -> None:
        await asyncio.wait({self._task})


def _identity(request: RolloutRequest) -> RolloutRequest:
    return replace(request, after_seq=None, traceparent="")


def _gone(request: RolloutRequest, why: str) -> MeshError:
    return MeshError(
        Reason.REVISION_EXPIRED,
        f"group {request.group_id} cannot be attached to behind event {request.after_seq}: {why}; ask for what did not"
        " arrive with a new request_id",
    )
