"""The RolloutService servicer: converts each request, calls the group runner, converts the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import grpc
import grpc.aio
from loguru import logger

from meshrl.rollout.runner import RolloutRunner
from meshrl.rollout.streams import ResumableStreams
from meshrl.v1 import rollout_pb2 as pb
from meshrl.v1 import rollout_pb2_grpc as pb_grpc
from meshrl.wire import convert
from meshrl.wire.repeated_requests import FirstAnswers
from meshrl.wire.types import CONTRACT_VERSION, RolloutRequest, capabilities

SERVICE = "meshrl.v1.RolloutService"


def add_to_server(servicer: RolloutServicer, server: grpc.aio.Server) -> None:
    """As the generated function does, but rollouts that come as bytes go out as they are."""

    def serialize(event: pb.RunRolloutsResponse | bytes) -> bytes:
        return event if isinstance(event, bytes) else event.SerializeToString()

    pb_grpc.add_RolloutServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]  # generated
    handlers = {
        "RunRollouts": grpc.unary_stream_rpc_method_handler(
            servicer.RunRollouts,
            request_deserializer=pb.RunRolloutsRequest.FromString,
            response_serializer=serialize,
        )
    }
    server.add_registered_method_handlers(SERVICE, handlers)


class RolloutServicer(pb_grpc.RolloutServiceServicer):
    """Thin: `runner` decides, and `streams` for calls that attach again."""

    def __init__(self, runner: RolloutRunner, on_drained: Callable[[], None] = lambda: None) -> None:
        """`on_drained` is called when a client's Drain has ended every group."""
        self._runner = runner
        self._on_drained = on_drained
        self._streams = ResumableStreams(runner.run)
        self._cancels: FirstAnswers[int] = FirstAnswers()

    async def ListEnvironments(  # noqa: N802  # the name of the RPC
        self, request: pb.ListEnvironmentsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListEnvironmentsResponse:
        infos = [player.info for player in self._runner.environments.values()]
        return pb.ListEnvironmentsResponse(
            contract_version=CONTRACT_VERSION,
            environments=[convert.to_proto(info) for info in infos],
            capabilities=capabilities.ROLLOUT,
        )

    async def RunRollouts(  # noqa: N802  # the name of the RPC
        self, request: pb.RunRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.RunRolloutsResponse | bytes, None]:
        async with aclosing(self._streams.follow(convert.from_proto(RolloutRequest, request))) as messages:
            async for message in messages:
                yield message

    async def CancelRollouts(  # noqa: N802  # the name of the RPC
        self, request: pb.CancelRolloutsRequest, context: grpc.aio.ServicerContext
    ) -> pb.CancelRolloutsResponse:
        group_ids = sorted(set(request.group_ids))

        async def cancel() -> int:
            return self._runner.cancel(group_ids)

        # A call that is repeated stops nothing that began after the first.
        cancelled = await self._cancels.once(request.request_id, "\0".join(group_ids).encode(), cancel)
        return pb.CancelRolloutsResponse(cancelled=cancelled)

    async def GetRolloutStatus(  # noqa: N802  # the name of the RPC
        self, request: pb.GetRolloutStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetRolloutStatusResponse:
        answer: pb.GetRolloutStatusResponse = convert.to_proto(self._runner.status())
        return answer

    async def Drain(  # noqa: N802  # the name of the RPC
        self, request: pb.RolloutServiceDrainRequest, context: grpc.aio.ServicerContext
    ) -> pb.RolloutServiceDrainResponse:
        logger.info("draining: {}", request.message or "a client asked for it")
        cancelled = await self._runner.drain(request.deadline_s if request.HasField("deadline_s") else None)
        self._on_drained()
        return pb.RolloutServiceDrainResponse(cancelled=cancelled)
