"""Client of RolloutService: requests groups, and gets each rollout once it is scored."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

from opentelemetry.trace import Tracer

from meshrl.client.backoff import AWAY_S, Backoff
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
    capabilities,
)
from meshrl.wire.validate import validate_contract_version

_REFUSED = "Connection refused"
"""In gRPC's error if the server's process is gone, with all that it kept."""
CANCEL_DEADLINE_S = 2.0
"""For the call that ends a group whose stream was closed."""


class RolloutClient(ServiceClient):
    """Failed calls raise MeshError alone."""

    service = "meshrl.v1.RolloutService"
    server_role = "rollout"
    idempotent_methods = ("ListEnvironments", "CancelRollouts", "GetRolloutStatus")

    def __init__(self, address: str, options: ChannelOptions | None = None, *, tracer: Tracer | None = None) -> None:
        super().__init__(address, options, tracer=tracer)
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._ending: set[asyncio.Task[None]] = set()
        self.contract_version = ""
        self.capabilities: frozenset[str] = frozenset()
        """The server's, once it has listed its environments."""

    async def close(self, grace_s: float | None = None) -> None:
        if self._ending:
            await asyncio.wait(self._ending, timeout=CANCEL_DEADLINE_S)
        await super().close(grace_s)

    async def list_environments(self, deadline_s: float | None = None) -> tuple[EnvironmentInfo, ...]:
        """Raises CONTRACT_MISMATCH for another major version."""
        request = pb.ListEnvironmentsRequest(
            contract_version=CONTRACT_VERSION, capabilities=capabilities.ROLLOUT_CALLER
        )
        response = await self._unary(self._stub.ListEnvironments, "ListEnvironments", request, deadline_s)
        validate_contract_version(response.contract_version)
        self.contract_version, self.capabilities = response.contract_version, frozenset(response.capabilities)
        return tuple(convert.from_proto(EnvironmentInfo, environment) for environment in response.environments)

    async def run_rollouts(self, request: RolloutRequest) -> AsyncGenerator[RolloutEvent, None]:
        """Yields a group's rollouts and failures in order of completion, then its summary.

        An unreadable rollout is a failure with reason BAD_ROLLOUT. Closing the iterator (`contextlib.aclosing`) cancels
        the group. A broken stream is attached to again for up to `linger_s` if the server can. Otherwise, and at an end
        without summary, it raises UNREACHABLE.
        """
        asked = request if request.traceparent else replace(request, traceparent=current_traceparent())
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + request.deadline_s + self.options.stream_margin_s
        summary: RolloutSummary | None = None
        reader, seq = convert.RolloutReader(self.contract_version), 0
        lost_s, backoff = ends_s, Backoff(*AWAY_S)
        try:
            while summary is None:
                try:
                    message, left_s = convert.to_proto(asked), ends_s - loop.time()
                    stream = self._stream(self._stub.RunRollouts, "RunRollouts", message, left_s, with_span=True)
                    async with aclosing(stream) as responses:
                        async for response in responses:
                            lost_s, seq = ends_s, response.seq
                            event = reader.read(response)
                            if isinstance(event, RolloutSummary):
                                summary = event  # given out once the call has ended: closing then cancels nothing
                            elif event is not None:
                                yield event
                    if summary is None:
                        raise MeshError(
                            Reason.UNREACHABLE, f"the stream of group {request.group_id} ended before its summary"
                        )
                except MeshError as error:
                    if error.reason is Reason.REVISION_EXPIRED:  # it has come back without the group
                        raise MeshError(Reason.UNREACHABLE, error.message) from error
                    lost_s, wait_s = min(lost_s, loop.time()), backoff.next_s()
                    can = seq > 0 or capabilities.REATTACH in self.capabilities
                    if error.reason is not Reason.UNREACHABLE or not can or _REFUSED in error.message:
                        raise
                    if loop.time() + wait_s > min(ends_s, lost_s + request.linger_s):
                        raise
                    await asyncio.sleep(wait_s)
                    asked = replace(asked, after_seq=seq)
        except (asyncio.CancelledError, GeneratorExit):
            if request.linger_s > 0:
                ending = asyncio.create_task(self._end_group(request.group_id))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
            raise
        yield summary

    async def _end_group(self, group_id: str) -> None:
        """If it fails, the server ends the group after its linger_s."""
        request = pb.CancelRolloutsRequest(request_id=str(uuid.uuid4()), group_ids=[group_id])
        with suppress(MeshError):
            await self._unary(self._stub.CancelRollouts, "CancelRollouts", request, CANCEL_DEADLINE_S)

    async def cancel_rollouts(self, group_ids: Sequence[str] = ()) -> int:
        request = pb.CancelRolloutsRequest(request_id=str(uuid.uuid4()), group_ids=group_ids)
        response = await self._unary(self._stub.CancelRollouts, "CancelRollouts", request)
        return int(response.cancelled)

    async def get_status(self, deadline_s: float | None = None) -> RolloutStatus:
        request = pb.GetRolloutStatusRequest()
        response = await self._unary(self._stub.GetRolloutStatus, "GetRolloutStatus", request, deadline_s)
        return convert.from_proto(RolloutStatus, response)
