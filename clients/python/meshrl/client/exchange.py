"""Client of RolloutExchange: a worker's stream to the orchestrator, and the list of workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from meshrl.client.channel import ChannelOptions, ServiceClient
from meshrl.v1 import exchange_pb2 as pb
from meshrl.v1 import exchange_pb2_grpc
from meshrl.wire import frames


class ExchangeClient(ServiceClient):
    """Failed calls raise MeshError alone."""

    service = "meshrl.v1.RolloutExchange"
    server_role = "orchestrator"
    idempotent_methods = ("ListWorkers",)

    def __init__(self, address: str, options: ChannelOptions | None = None) -> None:
        super().__init__(address, options)
        self._stub = exchange_pb2_grpc.RolloutExchangeStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._attach = self._channel.stream_stream(
            f"/{self.service}/Attach",
            request_serializer=frames.serialize,
            response_deserializer=pb.AttachResponse.FromString,
        )

    async def attach(
        self, messages: AsyncGenerator[pb.AttachRequest | bytes, None]
    ) -> AsyncGenerator[pb.AttachResponse, None]:
        """Sends `messages`, the hello first, until the orchestrator ends the stream. A broken line raises
        UNREACHABLE."""
        async for message in self._stream(self._attach, "Attach", messages, None, with_span=False):
            yield message

    async def list_workers(self, deadline_s: float | None = None) -> tuple[pb.AttachedWorker, ...]:
        """By name, all that have dialled in since the run began."""
        response = await self._unary(self._stub.ListWorkers, "ListWorkers", pb.ListWorkersRequest(), deadline_s)
        return tuple(response.workers)
