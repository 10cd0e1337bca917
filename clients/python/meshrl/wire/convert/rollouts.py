"""Events of RunRollouts: a dataclass for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshrl.v1 import rollout_pb2 as pb
from meshrl.wire.convert.by_annotation import from_proto, to_proto
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid
from meshrl.wire.types import Rollout, RolloutEvent, RolloutFailure, RolloutSummary, RoutedExpertsPart
from meshrl.wire.types.routes import Routes, joined
from meshrl.wire.validate import at_least

ROUTES_BYTES = 16 * 2**20
"""Routes of experts in one message, a rollout's own included: 64 MiB are the limit."""

_KINDS: Mapping[str, type[RolloutEvent]] = {"rollout": Rollout, "failure": RolloutFailure, "summary": RolloutSummary}
_FIELDS = {kind: field for field, kind in _KINDS.items()}


def rollout_event_to_proto(event: RolloutEvent) -> pb.RunRolloutsResponse:
    return pb.RunRolloutsResponse(**{_FIELDS[type(event)]: to_proto(event)})


def rollout_messages(event: RolloutEvent) -> list[pb.RunRolloutsResponse]:
    """One, after parts of the rollout's routes if these exceed ROUTES_BYTES."""
    if not isinstance(event, Rollout):
        return [rollout_event_to_proto(event)]
    routes = [sample.routed_experts for sample in event.samples]
    if sum(0 if each is None else each.nbytes for each in routes) <= ROUTES_BYTES:
        return [rollout_event_to_proto(event)]
    messages = []
    for place, each in enumerate(routes):
        if each is None:
            continue
        rows = max(1, ROUTES_BYTES // max(1, each[:1].nbytes))
        for start in range(0, len(each), rows):
            part = RoutedExpertsPart(
                rollout_id=event.rollout_id, sample=place, routed_experts=each[start : start + rows]
            )
            messages.append(pb.RunRolloutsResponse(routed_experts_part=to_proto(part)))
    return [*messages, rollout_event_to_proto(event.without_routes())]


class RolloutReader:
    """One stream's events, with parts put together."""

    def __init__(self, contract_version: str = "") -> None:
        """From the sender's contract 1.1 on an absent reward or temperature is an error."""
        self._sends_zeros = at_least(contract_version, "1.1")
        self._parts: dict[str, dict[int, list[Routes]]] = {}  # by rollout and sample

    def read(self, message: pb.RunRolloutsResponse) -> RolloutEvent | None:
        """None for a part and for an event of a newer contract. An unreadable rollout becomes a failure, so that
        later ones are not lost."""
        try:
            if message.WhichOneof("event") == "routed_experts_part":
                part = from_proto(RoutedExpertsPart, message.routed_experts_part)
                self._parts.setdefault(part.rollout_id, {}).setdefault(part.sample, []).append(part.routed_experts)
                return None
            if message.WhichOneof("event") == "rollout" and (bad := _unreadable(message.rollout, self._sends_zeros)):
                raise invalid(bad, "the rollout")
            event = rollout_event_from_proto(message)
            return self._whole(event) if isinstance(event, Rollout) else event
        except MeshError as error:  # of one rollout: the stream goes on
            rollout = message.rollout
            return RolloutFailure(
                rollout_id=rollout.rollout_id,
                group_id=rollout.group_id,
                reason=Reason.BAD_ROLLOUT.name,
                message=str(error),
                retryable=False,
                traceparent=rollout.traceparent,
            )

    def _whole(self, rollout: Rollout) -> Rollout:
        parts = self._parts.pop(rollout.rollout_id, None)
        if parts is None:
            return rollout
        routes = {place: joined([(len(each), each) for each in found]) for place, found in parts.items()}
        samples = tuple(
            replace(sample, routed_experts=routes.get(place, sample.routed_experts))
            for place, sample in enumerate(rollout.samples)
        )
        bad = [
            FieldViolation(
                f"rollout.samples[{place}].routed_experts",
                f"must have {len(sample.token_ids)} rows like token_ids, got {len(sample.routed_experts)} in parts",
            )
            for place, sample in enumerate(samples)
            if sample.routed_experts is not None and len(sample.routed_experts) != len(sample.token_ids)
        ]
        if bad:
            raise invalid(bad, "the rollout")
        return replace(rollout, samples=samples)


def _unreadable(rollout: pb.Rollout, sends_zeros: bool) -> list[FieldViolation]:
    found = []
    if sends_zeros and not rollout.HasField("reward"):
        found.append(FieldViolation("reward", "must be set, also where it is 0"))
    for place, sample in enumerate(rollout.samples):
        path = f"samples[{place}]"
        if sends_zeros and not sample.HasField("temperature"):
            found.append(FieldViolation(f"{path}.temperature", "must be set"))
        if sample.media:
            found.append(FieldViolation(f"{path}.media", "is not supported here: send tokens alone"))
        if sample.HasField("advantages"):
            found.append(FieldViolation(f"{path}.advantages", "is not supported here: send rewards"))
    return found


def rollout_event_from_proto(message: pb.RunRolloutsResponse) -> RolloutEvent | None:
    """None for an unknown kind. Raises as `from_proto`."""
    field = message.WhichOneof("event")
    kind = None if field is None else _KINDS.get(field)
    return None if field is None or kind is None else from_proto(kind, getattr(message, field))
