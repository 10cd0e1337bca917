"""Commands that rank 0 sends to the training threads of the other ranks, so that all do the same collectives in order.

A command travels as the length of its JSON (uint64, little-endian), that JSON and, of a TrainCommand, its rows.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar, get_args

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from meshrl.trainer.publishing.snapshots import PublicationSettings
from meshrl.trainer.runs.settings import RunSettings
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.training.parallel.sent_rows import decode_rows, encode_rows
from meshrl.wire.types import MicroBatch

HEARTBEAT_S = 5.0  # far below the time after which a collective that a rank does not join fails

Result = TypeVar("Result")
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainCommand:
    """Begin a step of the run with the rows of all ranks."""

    run_id: str
    micro_batches: Sequence[MicroBatch]


@dataclass(frozen=True, kw_only=True)
class PassCommand:
    """Pass the next slices of the run's batch, together with those of the runs `beside` it."""

    run_id: str
    slices: int
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CreateCommand:
    """Make a run with an adapter of its own."""

    run_id: str
    settings: RunSettings


@dataclass(frozen=True, kw_only=True)
class DeleteCommand:
    run_id: str


@dataclass(frozen=True, kw_only=True)
class PublishSetupCommand:
    """Prepare to publish the run's versions."""

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
    """Do nothing: rank 0 is alive and waits."""


@dataclass(frozen=True, kw_only=True)
class StopCommand:
    """Finish the save under way and leave the group."""


WorkCommand = (
    CreateCommand | DeleteCommand | PublishSetupCommand | TrainCommand | PassCommand | SnapshotCommand | SaveCommand
)
Command = WorkCommand | HeartbeatCommand | StopCommand

_KINDS: dict[str, type[Command]] = {kind.__name__: kind for kind in get_args(Command)}


def encode(command: Command) -> bytes:
    values = {"kind": type(command).__name__, **vars(command)}
    rows: Sequence[MicroBatch] = values.pop("micro_batches", ())
    head = to_json(values)
    return _LENGTH.pack(len(head)) + head + encode_rows(rows)


def decode(data: bytes) -> Command:
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    values = from_json(data[_LENGTH.size : end])
    kind = _KINDS[values.pop("kind")]
    if kind is TrainCommand:
        return TrainCommand(run_id=values["run_id"], micro_batches=decode_rows(data[end:]))
    command: Command = TypeAdapter(kind).validate_python(values)
    return command


class CommandSender:
    """Rank 0's side, for the thread that does the collectives. Sends nothing in a group of one."""

    def __init__(self, ranks: RankGroup, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._ranks = ranks
        self._heartbeat_s = heartbeat_s

    def send(self, command: Command) -> None:
        """The caller carries the command out right after."""
        if self._ranks.world_size > 1:
            self._ranks.broadcast(encode(command))

    def wait(self, future: Future[Result], *, check: Callable[[], float] = lambda: float("inf")) -> Result:
        """Waits for the future's result or error while heartbeats keep the other ranks waiting.

        `check` returns the seconds until its next call, and raises to end the wait.
        """
        beat = time.monotonic() + self._heartbeat_s
        while not future.done():
            left_s = min(check(), beat - time.monotonic())
            futures.wait([future], max(0.0, left_s))
            if not future.done() and time.monotonic() >= beat:
                self.send(HeartbeatCommand())
                beat = time.monotonic() + self._heartbeat_s
        return future.result()


def receive_commands(ranks: RankGroup, carry_out: Callable[[WorkCommand], None]) -> None:
    """Carries out rank 0's commands until StopCommand."""
    while True:
        command = decode(ranks.broadcast(None))
        if isinstance(command, StopCommand):
            return
        if not isinstance(command, HeartbeatCommand):
            carry_out(command)
