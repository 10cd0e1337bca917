"""What rank 0 tells the other ranks to do, and the bytes in which it travels over the group's broadcast.

Every collective of a training program happens in the same order on all ranks because it belongs to an order: rank 0
gives one and carries it out, the others receive it and do the same. Frames are one byte for the kind, then, for a
batch, protobuf messages that are each preceded by their length (uint64, little-endian).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from meshrl.trainer.publishing.progress import Progress
from meshrl.trainer.publishing.snapshots import PublicationSettings
from meshrl.v1 import trainer_pb2 as pb
from meshrl.wire.convert.batches import (
    BatchHeader,
    batch_header_from_proto,
    batch_header_to_proto,
    micro_batch_from_proto,
    micro_batch_to_proto,
)
from meshrl.wire.types import Batch

BEAT_S = 5.0  # far below the time after which a collective that nobody joins fails

Result = TypeVar("Result")
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, eq=False)
class Train:
    """Make a step from this batch."""

    batch: Batch


@dataclass(frozen=True, kw_only=True)
class Open:
    """Make ready to publish in this way; before anything else."""

    settings: PublicationSettings


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Take the weights as they are now, to be published."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """Write a checkpoint of the last step."""

    weights_only: bool
    in_background: bool = False


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Nothing to do: rank 0 lives."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The end, in order."""


Order = Open | Train | Gather | Save | Beat | Stop

_PLAIN: dict[bytes, Order] = {
    b"G": Gather(),
    b"W": Save(weights_only=True),
    b"C": Save(weights_only=False),
    b"w": Save(weights_only=True, in_background=True),
    b"c": Save(weights_only=False, in_background=True),
    b"B": Beat(),
    b"S": Stop(),
}
_TRAIN, _OPEN = b"T", b"O"


def encode(order: Order) -> bytes:
    """The bytes of an order."""
    if isinstance(order, Train):
        return _TRAIN + b"".join(_frames(order.batch))
    if isinstance(order, Open):
        return _OPEN + order.settings.to_json()
    return next(kind for kind, plain in _PLAIN.items() if plain == order)


def decode(data: bytes) -> Order:
    """The order of some bytes. A batch's arrays are views into them; its digest is not computed a second time."""
    kind = data[:1]
    if kind == _OPEN:
        return Open(settings=PublicationSettings.from_json(data[1:]))
    if kind != _TRAIN:
        return _PLAIN[kind]
    parts = list(_parts(memoryview(data)[1:]))
    header = batch_header_from_proto(pb.BatchHeader.FromString(parts[0]))
    return Train(
        batch=Batch(
            run_id=header.run_id,
            step=header.step,
            micro_batches=tuple(micro_batch_from_proto(pb.MicroBatch.FromString(part)) for part in parts[1:]),
            loss_tokens=header.loss_tokens,
            environments=header.environments,
            traceparent=header.traceparent,
        )
    )


def _frames(batch: Batch) -> Iterator[bytes]:
    header = BatchHeader(
        run_id=batch.run_id,
        step=batch.step,
        digest="",
        num_micro_batches=len(batch.micro_batches),
        loss_tokens=batch.loss_tokens,
        environments=batch.environments,
        traceparent=batch.traceparent,
    )
    messages: list[Message] = [batch_header_to_proto(header), *map(micro_batch_to_proto, batch.micro_batches)]
    for message in messages:
        data = message.SerializeToString()
        yield _LENGTH.pack(len(data))
        yield data


def _parts(data: memoryview) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        yield bytes(data[at : at + length])
        at += length


class Broadcaster(Protocol):
    """What orders need of the parallel context."""

    @property
    def world_size(self) -> int: ...

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; blocks until rank 0 sends."""


class Orders:
    """Rank 0's voice. Alone in its group it says nothing. For one thread: the one that does the collectives."""

    def __init__(self, group: Broadcaster, *, beat_s: float = BEAT_S) -> None:
        self._group = group
        self._beat_s = beat_s

    def give(self, order: Order) -> None:
        """Sends an order; the caller carries it out right after."""
        if self._group.world_size > 1:
            self._group.broadcast(encode(order))

    def wait(
        self, future: Future[Result], *, progress: Progress | None = None, stall_s: float = float("inf")
    ) -> Result:
        """The result of `future`; the other ranks hear meanwhile that rank 0 lives.

        Raises TimeoutError when its `progress` stood still for `stall_s`.
        """
        while not future.done():
            left_s = float("inf") if progress is None else progress.left_s(stall_s)
            if left_s <= 0:
                raise TimeoutError(f"nothing moved for {stall_s:g} s")
            futures.wait([future], min(self._beat_s, left_s))
            if not future.done():
                self.give(Beat())
        return future.result()


def follow(group: Broadcaster, carry_out: Callable[[Open | Train | Gather | Save], None]) -> None:
    """A rank but the first: carries out what rank 0 orders until it says Stop. An error of an order ends the rank."""
    while True:
        order = decode(group.broadcast(None))
        if isinstance(order, Stop):
            return
        if not isinstance(order, Beat):
            carry_out(order)
