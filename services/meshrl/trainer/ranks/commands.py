"""Commands that rank 0 sends to the training threads of the other ranks, so that all do the same collectives in order.

Rank 0's training loop sends a command and carries it out itself; every other rank (`worker`) receives it over the
group's broadcast and carries it out too. A command is one byte for its kind; one for a run goes on with the run's id,
preceded by its length (uint64, little-endian), and with its payload. That of a TrainCommand is the batch as protobuf
messages, each preceded by its length too, as are the other runs of a PassCommand; that of a PublishSetupCommand its
settings as JSON.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from meshrl.trainer.publishing.snapshots import PublicationSettings
from meshrl.v1 import trainer_pb2 as pb
from meshrl.versions.progress import Progress
from meshrl.wire.convert import from_proto, to_proto
from meshrl.wire.convert.micro_batches import micro_batch_from_proto, micro_batch_to_proto
from meshrl.wire.types import Batch, BatchHeader

HEARTBEAT_S = 5.0  # far below the time after which a collective that a rank does not join fails

Result = TypeVar("Result")
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainCommand:
    run_id: str
    batch: Batch


@dataclass(frozen=True, kw_only=True)
class PassCommand:
    """Pass the next slices of the run's batch, in one pass with those of the runs `beside` it; a step is made with the
    last of its slices."""

    run_id: str
    slices: int
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CreateCommand:
    """Make a run with an adapter of its own. `settings` are RunSettings as JSON."""

    run_id: str
    settings: bytes


@dataclass(frozen=True, kw_only=True)
class DeleteCommand:
    run_id: str


@dataclass(frozen=True, kw_only=True)
class PublishSetupCommand:
    """Prepare to publish the run's versions with these settings; the first command of a run."""

    run_id: str
    settings: PublicationSettings


@dataclass(frozen=True, kw_only=True)
class SnapshotCommand:
    run_id: str


@dataclass(frozen=True, kw_only=True)
class SaveCommand:
    run_id: str
    weights_only: bool
    in_background: bool = False


@dataclass(frozen=True, kw_only=True)
class HeartbeatCommand:
    """Do nothing: rank 0 is alive and waits for something."""


@dataclass(frozen=True, kw_only=True)
class StopCommand:
    """Finish the save under way and leave the group."""


WorkCommand = (
    CreateCommand | DeleteCommand | PublishSetupCommand | TrainCommand | PassCommand | SnapshotCommand | SaveCommand
)
Command = WorkCommand | HeartbeatCommand | StopCommand

_CREATE, _DELETE, _TRAIN, _PASS, _PUBLISH_SETUP, _SNAPSHOT, _SAVE = b"N", b"D", b"T", b"P", b"O", b"G", b"C"
_HEARTBEAT, _STOP = b"B", b"S"


def encode(command: Command) -> bytes:
    match command:
        case HeartbeatCommand():
            return _HEARTBEAT
        case StopCommand():
            return _STOP
        case TrainCommand():
            kind, payload = _TRAIN, b"".join(_frames(command.batch))
        case PassCommand():
            beside = b"".join(_framed(run_id.encode()) for run_id in command.beside)
            kind, payload = _PASS, _LENGTH.pack(command.slices) + beside
        case CreateCommand():
            kind, payload = _CREATE, command.settings
        case DeleteCommand():
            kind, payload = _DELETE, b""
        case PublishSetupCommand():
            kind, payload = _PUBLISH_SETUP, command.settings.to_json()
        case SnapshotCommand():
            kind, payload = _SNAPSHOT, b""
        case SaveCommand():
            kind, payload = _SAVE, bytes([command.weights_only, command.in_background])
    return kind + _framed(command.run_id.encode()) + payload


def decode(data: bytes) -> Command:
    """The command of some bytes. A batch's arrays are views into them; its digest is not computed a second time."""
    kind = data[:1]
    if kind == _HEARTBEAT:
        return HeartbeatCommand()
    if kind == _STOP:
        return StopCommand()
    first, payload = _unframed(memoryview(data)[1:])
    run_id = first.decode()
    if kind == _CREATE:
        return CreateCommand(run_id=run_id, settings=bytes(payload))
    if kind == _DELETE:
        return DeleteCommand(run_id=run_id)
    if kind == _PASS:
        beside = tuple(each.decode() for each in _all_unframed(payload[_LENGTH.size :]))
        return PassCommand(run_id=run_id, slices=_LENGTH.unpack_from(payload)[0], beside=beside)
    if kind == _SNAPSHOT:
        return SnapshotCommand(run_id=run_id)
    if kind == _SAVE:
        return SaveCommand(run_id=run_id, weights_only=bool(payload[0]), in_background=bool(payload[1]))
    if kind == _PUBLISH_SETUP:
        return PublishSetupCommand(run_id=run_id, settings=PublicationSettings.from_json(bytes(payload)))
    messages = list(_all_unframed(payload))
    header = from_proto(BatchHeader, pb.BatchHeader.FromString(messages[0]))
    return TrainCommand(
        run_id=run_id,
        batch=Batch(
            run_id=header.run_id,
            step=header.step,
            micro_batches=tuple(micro_batch_from_proto(pb.MicroBatch.FromString(message)) for message in messages[1:]),
            loss_tokens=header.loss_tokens,
            environments=header.environments,
            traceparent=header.traceparent,
        ),
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
    messages: list[Message] = [to_proto(header), *map(micro_batch_to_proto, batch.micro_batches)]
    for message in messages:
        yield _framed(message.SerializeToString())


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _unframed(data: memoryview) -> tuple[bytes, memoryview]:
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    return bytes(data[_LENGTH.size : end]), data[end:]


def _all_unframed(data: memoryview) -> Iterator[bytes]:
    while data:
        frame, data = _unframed(data)
        yield frame


class Broadcaster(Protocol):
    """The part of a RankGroup that commands use."""

    @property
    def world_size(self) -> int: ...

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; blocks until rank 0 sends."""


class CommandSender:
    """Rank 0's side. Sends nothing in a group of one. For one thread: the one that does the collectives."""

    def __init__(self, ranks: Broadcaster, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._ranks = ranks
        self._heartbeat_s = heartbeat_s

    def send(self, command: Command) -> None:
        """Sends a command to all other ranks; the caller carries it out right after."""
        if self._ranks.world_size > 1:
            self._ranks.broadcast(encode(command))

    def wait(
        self, future: Future[Result], *, progress: Progress | None = None, stall_s: float = float("inf")
    ) -> Result:
        """Waits for `future` while heartbeats keep the other ranks waiting; returns its result or raises its error.

        Raises TimeoutError when `progress` reports no move for `stall_s` seconds.
        """
        while not future.done():
            left_s = float("inf") if progress is None else progress.left_s(stall_s)
            if left_s <= 0:
                raise TimeoutError(f"nothing moved for {stall_s:g} s")
            futures.wait([future], min(self._heartbeat_s, left_s))
            if not future.done():
                self.send(HeartbeatCommand())
        return future.result()


def receive_commands(ranks: Broadcaster, carry_out: Callable[[WorkCommand], None]) -> None:
    """Every other rank's side: carries out rank 0's commands until StopCommand. An error in one ends the rank."""
    while True:
        command = decode(ranks.broadcast(None))
        if isinstance(command, StopCommand):
            return
        if not isinstance(command, HeartbeatCommand):
            carry_out(command)
