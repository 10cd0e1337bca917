"""The RolloutService servicer: checks requests, converts, plays, converts back; errors as the contract has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import NoReturn

import grpc.aio

from meshrl.v1 import rollout_pb2 as pb
from meshrl.v1 import rollout_pb2_grpc as pb_grpc
from meshrl.wire import convert, validate
from meshrl.wire.errors import STATUS_DETAILS_KEY, MeshError, to_rpc_status
from meshrl.wire.types import CONTRACT_VERSION, RolloutRequest
from meshrl_verifiers_v0.groups import GroupPlayer


class OldEnvServicer(pb_grpc.RolloutServiceServicer):
    """One object a server."""

    def __init__(self, player: GroupPlayer) -> None:
        self._player = player

    async def ListEnvironments(self, request, context):  # noqa: N802  # the name of the RPC
        try:
            validate.check(request)
        except MeshError as error:
            await abort(context, error)
        infos = [env.info for env in self._player.environments.values()]
        return pb.ListEnvironmentsResponse(
            contract_version=CONTRACT_VERSION, environments=[convert.to_proto(info) for info in infos]
        )

    async def RunRollouts(self, request, context) -> AsyncIterator[pb.RunRolloutsResponse]:  # noqa: N802  # the same
        try:
            validate.check(request)
            async with aclosing(self._player.run(convert.from_proto(RolloutRequest, request))) as events:
                async for event in events:
                    yield convert.rollout_event_to_proto(event)
        except MeshError as error:
            await abort(context, error)

    async def CancelRollouts(self, request, context):  # noqa: N802  # the same
        return pb.CancelRolloutsResponse(cancelled=self._player.cancel(tuple(request.group_ids)))

    async def GetRolloutStatus(self, request, context):  # noqa: N802  # the same
        return convert.to_proto(self._player.status())


async def abort(context: grpc.aio.ServicerContext, error: MeshError) -> NoReturn:
    status = to_rpc_status(error)
    await context.abort(error.reason.code, status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort raises")
