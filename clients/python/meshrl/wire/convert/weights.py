"""Messages of WeightSync of which a newer peer may send unknown kinds."""

from __future__ import annotations

from collections.abc import Mapping

from meshrl.v1 import weights_pb2 as pb
from meshrl.wire.convert.by_annotation import from_proto, to_proto
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import (
    Abort,
    AgentCommand,
    Commit,
    DrainAgent,
    JoinGroup,
    Prepare,
    Resume,
    Retire,
    Sleep,
    VersionEvent,
    VersionInfo,
)

_COMMANDS: Mapping[str, type[AgentCommand]] = {
    "prepare": Prepare,
    "commit": Commit,
    "abort": Abort,
    "resume": Resume,
    "drain": DrainAgent,
    "join_group": JoinGroup,
    "sleep": Sleep,
    "retire": Retire,
}
_FIELDS = {kind: field for field, kind in _COMMANDS.items()}


def agent_command_to_proto(command: AgentCommand) -> pb.SessionResponse:
    return pb.SessionResponse(**{_FIELDS[type(command)]: to_proto(command)})


def agent_command_from_proto(message: pb.SessionResponse) -> AgentCommand | None:
    """None for an unknown command."""
    field = message.WhichOneof("command")
    kind = None if field is None else _COMMANDS.get(field)
    return None if field is None or kind is None else from_proto(kind, getattr(message, field))


def version_info_from_proto(message: pb.VersionInfo) -> VersionInfo:
    """Raises CONTRACT_MISMATCH for an unknown state or transport."""
    try:
        return from_proto(VersionInfo, message)
    except MeshError as error:
        raise MeshError(
            Reason.CONTRACT_MISMATCH,
            f"version {message.version} has state {message.state} and transport {message.transport}, "
            "which this program does not know; update it to the hub's release",
        ) from error


def version_event_from_proto(message: pb.WatchVersionsResponse) -> VersionEvent | None:
    """None for an unknown state or transport."""
    try:
        return from_proto(VersionEvent, message)
    except MeshError:  # of a newer hub; a watch goes on
        return None
