"""Client of RolloutExchange: a worker's stream to the orchestrator that gives it work, and the list of workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from opentelemetry.trace import Tracer

from meshrl.client.channel import ChannelOptions, ServiceClient
from meshrl.v1 import exchange_pb2 as pb
from meshrl.v1 import exchange_pb2_grpc


class ExchangeClient(ServiceClient):
    """Every method raises MeshError, and nothing else, when its call fails."""

    service = "meshrl.v1.RolloutExchange"
    server_role = "orchestrator"
    idempotent_methods = ("ListWorkers",)

    def __init__(self, address: str, options: ChannelOptions | None = None, *, tracer: Tracer | None = None) -> None:
        super().__init__(address, options, tracer=tracer)
        self._stub = exchange_pb2_grpc.RolloutExchangeStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._attach = self._channel.stream_stream(
            f"/{self.service}/Attach",
            request_serializer=_serialize,
            response_deserializer=pb.AttachResponse.FromString,
        )

    async def attach(
        self, messages: AsyncGenerator[pb.AttachRequest | bytes, None]
    ) -> AsyncGenerator[pb.AttachResponse, None]:
        """Sends `messages`, the hello first, and yields the orchestrator's until it ends the stream; bytes are an
        AttachRequest. A broken line raises UNREACHABLE."""
        async for message in self._stream(self._attach, "Attach", messages, None, with_span=False):
            yield message

    async def list_workers(self, deadline_s: float | None = None) -> tuple[pb.AttachedWorker, ...]:
        """All that have dialled in since the run began, by name."""
        response = await self._unary(self._stub.ListWorkers, "ListWorkers", pb.ListWorkersRequest(), deadline_s)
        return tuple(response.workers)


def _serialize(message: pb.AttachRequest | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
