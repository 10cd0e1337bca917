"""The front's calls of a worker over a socket pair: messages of the contract without gRPC, which costs 30 times more.

A frame is its length, its kind, the number of its call and the bytes of a message. The front sends PLAY
(RunRolloutsRequest) and CANCEL. The worker answers with EVENTs (RunRolloutsResponse) and END, or REFUSED
(google.rpc.Status). It sends READY (ListEnvironmentsResponse) once it takes calls, then STATUS
(GetRolloutStatusResponse) every second. The pair's end shows each side that the other one has left.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections.abc import Callable

MOST_WAITING_BYTES = 64 * 2**20
"""Untaken bytes beyond which no call or rollout begins."""

_HEAD = struct.Struct("<IBQ")


class FrameKind(enum.IntEnum):
    PLAY = 0
    CANCEL = 1
    EVENT = 2
    END = 3
    REFUSED = 4
    READY = 5
    STATUS = 6


class Link(asyncio.Protocol):
    """One end of the pair; `take` gets the kind, number and bytes of each frame."""

    def __init__(self, take: Callable[[FrameKind, int, bytes], None]) -> None:
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the other side has left."""
        self.room = asyncio.Event()
        """Set unless MOST_WAITING_BYTES are untaken; set when the other side has left."""
        self.room.set()
        self._take = take
        self._got = bytearray()
        self._transport: asyncio.Transport | None = None

    def send(self, kind: FrameKind, number: int = 0, message: bytes = b"") -> None:
        if self._transport is not None:
            self._transport.write(_HEAD.pack(len(message), kind, number) + message)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # of a stream socket
        self._transport = transport
        transport.set_write_buffer_limits(high=MOST_WAITING_BYTES)

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()

    def data_received(self, data: bytes) -> None:
        got, at = self._got, 0
        got += data
        with memoryview(got) as view:
            while len(got) - at >= _HEAD.size:
                size, kind, number = _HEAD.unpack_from(got, at)
                begin = at + _HEAD.size
                if len(got) < begin + size:
                    break
                at = begin + size
                self._take(FrameKind(kind), number, bytes(view[begin:at]))
        del got[:at]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.room.set()
        if not self.left.done():
            self.left.set_result(None)
