"""The standard gRPC health service, with a status for each service.

In the servicer of the grpc_health package a watcher that leaves makes all others of the same service deaf.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshrl.core.waiting import Pulse

_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc has no types
    """Also for the server, under the empty name. Everything starts as NOT_SERVING."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {"": False}
        self._changed = Pulse()

    def set(self, services: Iterable[str], serving: bool) -> None:
        self._serving.update(dict.fromkeys((*services, ""), serving))
        self._changed.beat()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        serving = self._serving.get(service)
        if serving is None:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if serving else _Status.NOT_SERVING

    async def Check(  # noqa: N802  # named by the contract
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """NOT_FOUND for a service that is not hosted."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.service} is not hosted here")
        return _Status(status=self._status(request.service))

    async def Watch(  # noqa: N802  # named by the contract
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            upcoming, status = self._changed.upcoming, self._status(request.service)
            if status != last:
                last = status
                yield _Status(status=status)
            await upcoming.wait()
