"""The channel between the service's front and one worker: frames over a Unix socket, in both directions.

A frame is a header (length of the payload, kind, group, rollout) and the payload: a serialised message of the contract,
or JSON of this program's own, such as a heartbeat. Front and worker are of one version, so this is no contract.
"""

from __future__ import annotations

import asyncio
import enum
import json
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as fields_of

from meshrl.rollout.config import RolloutConfig
from meshrl.rollout.deadlines.stages import RolloutStage, StageKind
from meshrl.rollout.engines.capacity import EpisodeSizes
from meshrl.rollout.player import SerializedRollouts

HEADER = struct.Struct("<IBIi")
LENGTH = struct.Struct("<I")
SIZES = struct.Struct("<Qddd")

HEARTBEAT_EVERY_S = 0.5


class FrameKind(enum.IntEnum):
    """The kind of a frame. Those up to STOP go to the worker, the others come from it."""

    OPEN = 1
    """Find the task of this RunRolloutsRequest; the group has this number from now on."""
    PLAY = 2
    """Play one rollout of a group."""
    CANCEL = 3
    """End one rollout; no answer."""
    CLOSE = 4
    """Forget the group; no answer."""
    STOP = 5
    """Close the environments and exit."""
    READY = 16
    """A ListEnvironmentsResponse: they are loaded."""
    UNUSABLE = 17
    """Text: the configuration cannot be used."""
    OPENED = 18
    REFUSED = 19
    """A google.rpc.Status: the group's task cannot be had."""
    FINISHED = 20
    """The EpisodeSizes, then each RunRolloutsResponse behind its length."""
    FAILED = 21
    """A RolloutFailure."""
    HEARTBEAT = 22
    """JSON of a Heartbeat."""
    BLOCKED = 23
    """Alarm, JSON: which environment's code has held the event loop up, where, and for how many seconds."""
    LEAVING = 24
    """Alarm, JSON: which environment's code ends the process."""


class Channel(asyncio.Protocol):
    """One end of a channel. `on_frame(kind, group, index, payload)` gets each frame, `on_lost()` the end."""

    def __init__(
        self, on_frame: Callable[[FrameKind, int, int, bytes], None], on_lost: Callable[[], None] = lambda: None
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def over(
        cls,
        sock: socket.socket,
        on_frame: Callable[[FrameKind, int, int, bytes], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> Channel:
        """A channel over a connected socket, which it closes."""
        _, channel = await asyncio.get_running_loop().create_connection(lambda: cls(on_frame, on_lost), sock=sock)
        return channel

    def send(self, kind: FrameKind, group: int = 0, index: int = -1, payload: bytes = b"") -> None:
        """Sends a frame; one that the other side is too gone to take is dropped."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(kind, group, index, payload))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        position, size = 0, len(self._received)
        while size - position >= HEADER.size:
            length, kind, group, index = HEADER.unpack_from(self._received, position)
            end = position + HEADER.size + length
            if end > size:
                break
            payload = bytes(self._received[position + HEADER.size : end])
            position = end
            self._on_frame(FrameKind(kind), group, index, payload)
        del self._received[:position]

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()


def encode(kind: FrameKind, group: int = 0, index: int = -1, payload: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return HEADER.pack(len(payload), kind, group, index) + payload


def pack_rollouts(played: SerializedRollouts) -> bytes:
    """The payload of FINISHED."""
    sizes = played.sizes
    parts = [SIZES.pack(sizes.sampled_tokens, sizes.held_tokens, sizes.total_s, sizes.calls_s)]
    for message in played.messages:
        parts += (LENGTH.pack(len(message)), message)
    return b"".join(parts)


def unpack_rollouts(payload: bytes) -> SerializedRollouts:
    """The content of FINISHED."""
    sizes = EpisodeSizes(*SIZES.unpack_from(payload))
    messages, position = [], SIZES.size
    while position < len(payload):
        (length,) = LENGTH.unpack_from(payload, position)
        position += LENGTH.size
        messages.append(payload[position : position + length])
        position += length
    return SerializedRollouts(messages, sizes)


# --- payloads in JSON ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Worker `number` hosts the environments `names` of `config`."""

    number: int
    config: RolloutConfig
    names: Sequence[str]
    max_memory_mib: int
    mark: str = ""
    """In the environment variables of every process that the worker starts, so that they can be found and ended."""

    def encode(self) -> str:
        """As JSON. Keys that are not set stay so: they have their defaults in the worker too."""
        fields = {field.name: getattr(self, field.name) for field in fields_of(self)}
        return json.dumps(fields | {"config": self.config.model_dump(exclude_unset=True)}, default=str)  # paths

    @classmethod
    def decode(cls, text: str) -> WorkerSettings:
        # Not by pydantic's own JSON parser: it refuses a default that is a Path, and has no infinity.
        fields = json.loads(text)
        return cls(**fields | {"config": RolloutConfig.model_validate(fields["config"])})


@dataclass(frozen=True)
class Heartbeat:
    """Reports that a worker's event loop runs.

    `stages` are the rollout stages that changed since the last heartbeat, as (group, rollout, stage); `in_flight` has
    the worker's model calls by engine URL.
    """

    stages: Sequence[tuple[int, int, RolloutStage]] = ()
    in_flight: Mapping[str, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        stages = [(group, index, stage.what, stage.began_s, stage.kind.value) for group, index, stage in self.stages]
        return json.dumps({"stages": stages, "in_flight": dict(self.in_flight)}).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Heartbeat:
        values = json.loads(payload)
        stages = [
            (group, index, RolloutStage(what, began_s, StageKind(kind)))
            for group, index, what, began_s, kind in values["stages"]
        ]
        return cls(stages, values["in_flight"])
