"""The RolloutService servicer: checks requests at the door, converts, calls `episodes`, converts back."""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio

from meshrl.rollout.episodes import Episodes
from meshrl.v1 import rollout_pb2 as pb
from meshrl.v1 import rollout_pb2_grpc as pb_grpc
from meshrl.wire import convert
from meshrl.wire.errors import FieldViolation, MeshError, Reason
from meshrl.wire.types import CONTRACT_VERSION, RolloutRequest, Sampling

LONGEST_DEADLINE_S = 7 * 24 * 3600.0


class RolloutServicer(pb_grpc.RolloutServiceServicer):
    """Thin: every decision is in `episodes` and `groups`."""

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes

    async def ListEnvironments(  # noqa: N802  # the name of the RPC
        self, request: pb.ListEnvironmentsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListEnvironmentsResponse:
        convert.check_contract_version(request.contract_version)
        infos = [environment.info for environment in self._episodes.environments.values()]
        return pb.ListEnvironmentsResponse(
            contract_version=CONTRACT_VERSION, environments=[convert.environment_to_proto(info) for info in infos]
        )

    async def RunRollouts(  # noqa: N802  # the name of the RPC
        self, request: pb.RunRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RunRolloutsResponse]:
        wanted = convert.rollout_request_from_proto(request)
        check(wanted)
        async with aclosing(self._episodes.run(wanted)) as events:
            async for event in events:
                yield convert.rollout_event_to_proto(event)

    async def CancelRollouts(  # noqa: N802  # the name of the RPC
        self, request: pb.CancelRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> pb.CancelRolloutsResponse:
        return pb.CancelRolloutsResponse(cancelled=self._episodes.cancel(tuple(request.group_ids)))

    async def GetRolloutStatus(  # noqa: N802  # the name of the RPC
        self, request: pb.GetRolloutStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetRolloutStatusResponse:
        return convert.rollout_status_to_proto(self._episodes.status())


def check(request: RolloutRequest) -> None:
    """Raises MeshError INVALID_REQUEST that names every field that is wrong and what it must be."""
    violations = [*_identity_violations(request), *sampling_violations(request.sampling)]
    if violations:
        raise MeshError(Reason.INVALID_REQUEST, "the group cannot be run as asked", violations=tuple(violations))


def _identity_violations(request: RolloutRequest) -> list[FieldViolation]:
    found: list[FieldViolation] = []
    try:
        uuid.UUID(request.request_id)
    except ValueError:
        found.append(FieldViolation("request_id", f"must be a UUID, got {request.request_id!r}"))
    if not request.group_id:
        found.append(FieldViolation("group_id", "must not be empty"))
    if not request.environment:
        found.append(FieldViolation("environment", "must not be empty"))
    if request.task_index is None and request.task_payload is None:
        found.append(FieldViolation("task", "set task_index or task_payload"))
    if request.group_size < 1:
        found.append(FieldViolation("group_size", "must be at least 1"))
    if not (math.isfinite(request.deadline_s) and 0 < request.deadline_s <= LONGEST_DEADLINE_S):
        found.append(
            FieldViolation("deadline_s", f"must be positive and at most {LONGEST_DEADLINE_S:g}, got {request.deadline_s:g}")
        )
    return found


def sampling_violations(sampling: Sampling) -> list[FieldViolation]:
    """What is wrong with the set fields of a sampling."""
    rules = (
        ("temperature", sampling.temperature, lambda x: math.isfinite(x) and x >= 0, "must be at least 0"),
        ("top_p", sampling.top_p, lambda x: 0 < x <= 1, "must be in (0, 1]"),
        ("top_k", sampling.top_k, lambda x: x >= -1, "must be at least -1"),
        ("min_p", sampling.min_p, lambda x: 0 <= x <= 1, "must be in [0, 1]"),
        ("max_tokens", sampling.max_tokens, lambda x: x >= 1, "must be at least 1"),
    )
    found = [
        FieldViolation(f"sampling.{name}", f"{rule}, got {value:g}")
        for name, value, holds, rule in rules
        if value is not None and not holds(value)
    ]
    if any(token < 0 for token in sampling.stop_token_ids):
        found.append(FieldViolation("sampling.stop_token_ids", "must not contain negative ids"))
    return found
