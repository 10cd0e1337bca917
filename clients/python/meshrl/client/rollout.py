"""Client of RolloutService: asks for groups of rollouts and receives each one the moment it is scored."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from opentelemetry.trace import Tracer

from meshrl.client.channel import ChannelOptions, ServiceClient
from meshrl.v1 import rollout_pb2 as pb
from meshrl.v1 import rollout_pb2_grpc
from meshrl.wire import convert
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.trace import current_traceparent
from meshrl.wire.types import (
    CONTRACT_VERSION,
    EnvironmentInfo,
    RolloutEvent,
    RolloutRequest,
    RolloutStatus,
    RolloutSummary,
)
from meshrl.wire.validate import validate_contract_version


class RolloutClient(ServiceClient):
    """Every method raises MeshError, and nothing else, when its call fails."""

    service = "meshrl.v1.RolloutService"
    server_role = "rollout"
    idempotent_methods = ("ListEnvironments", "CancelRollouts", "GetRolloutStatus")

    def __init__(self, address: str, options: ChannelOptions | None = None, *, tracer: Tracer | None = None) -> None:
        super().__init__(address, options, tracer=tracer)
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    async def list_environments(self, deadline_s: float | None = None) -> tuple[EnvironmentInfo, ...]:
        """Returns the hosted environments; raises CONTRACT_MISMATCH for a server of another major version."""
        request = pb.ListEnvironmentsRequest(contract_version=CONTRACT_VERSION)
        response = await self._unary(self._stub.ListEnvironments, "ListEnvironments", request, deadline_s)
        validate_contract_version(response.contract_version)
        return tuple(convert.from_proto(EnvironmentInfo, environment) for environment in response.environments)

    async def run_rollouts(self, request: RolloutRequest) -> AsyncGenerator[RolloutEvent, None]:
        """Yields the rollouts and failures of one group in order of completion, then its summary.

        A rollout that cannot be read comes as a failure with reason BAD_ROLLOUT; those after it are not lost.
        Closing the iterator (`contextlib.aclosing`) cancels the group. A stream that ends without its summary raises
        UNREACHABLE.
        """
        message = convert.to_proto(
            request if request.traceparent else replace(request, traceparent=current_traceparent())
        )
        deadline_s = request.deadline_s + self.options.stream_margin_s
        summary: RolloutSummary | None = None
        reader = convert.RolloutReader()
        call = self._stub.RunRollouts
        async with aclosing(self._stream(call, "RunRollouts", message, deadline_s, with_span=True)) as stream:
            async for response in stream:
                event = reader.read(response)
                if isinstance(event, RolloutSummary):
                    summary = event  # given out once the call has ended, so that closing then cancels nothing
                elif event is not None:
                    yield event
        if summary is None:
            raise MeshError(Reason.UNREACHABLE, f"the stream of group {request.group_id} ended before its summary")
        yield summary

    async def cancel_rollouts(self, group_ids: Sequence[str] = ()) -> int:
        """Stops the groups named, or all; returns the number of rollouts that were running."""
        request = pb.CancelRolloutsRequest(request_id=str(uuid.uuid4()), group_ids=group_ids)
        response = await self._unary(self._stub.CancelRollouts, "CancelRollouts", request)
        return int(response.cancelled)

    async def get_status(self, deadline_s: float | None = None) -> RolloutStatus:
        """Returns what the server is doing."""
        request = pb.GetRolloutStatusRequest()
        response = await self._unary(self._stub.GetRolloutStatus, "GetRolloutStatus", request, deadline_s)
        return convert.from_proto(RolloutStatus, response)
