"""Events of RunRollouts: a message of one of several kinds to the dataclass of that kind and back."""

from __future__ import annotations

from collections.abc import Mapping

from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire.convert.by_annotation import from_proto, to_proto
from meshrl.wire.types import Rollout, RolloutEvent, RolloutFailure, RolloutSummary

_KINDS: Mapping[str, type[RolloutEvent]] = {"rollout": Rollout, "failure": RolloutFailure, "summary": RolloutSummary}
_FIELDS = {kind: field for field, kind in _KINDS.items()}


def rollout_event_to_proto(event: RolloutEvent) -> pb.RunRolloutsResponse:
    return pb.RunRolloutsResponse(**{_FIELDS[type(event)]: to_proto(event)})


def rollout_event_from_proto(message: pb.RunRolloutsResponse) -> RolloutEvent | None:
    """The event, or None for one of a kind that this program does not know. Raises as `from_proto`."""
    field = message.WhichOneof("event")
    kind = None if field is None else _KINDS.get(field)
    return None if field is None or kind is None else from_proto(kind, getattr(message, field))
