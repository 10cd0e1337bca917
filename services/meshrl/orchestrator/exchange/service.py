"""The RolloutExchange servicer: takes workers in under their names, and lets the rollout pool use each as a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from loguru import logger

from meshrl.client.credentials import Credentials
from meshrl.core.rpc.guard import CALLER
from meshrl.core.rpc.paging import page_of
from meshrl.core.rpc.serve import GrpcServer
from meshrl.orchestrator.exchange.config import ExchangeConfig
from meshrl.orchestrator.exchange.worker import DialedInWorker, WorkerStream
from meshrl.sampling.pool import RolloutPool
from meshrl.v1 import exchange_pb2 as pb
from meshrl.v1 import exchange_pb2_grpc as pb_grpc
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid

SERVICE = "meshrl.v1.RolloutExchange"
HELLO_S = 30.0
LOOK_S = 1.0


class RolloutExchange(pb_grpc.RolloutExchangeServicer):
    """`start` it before the run waits for its services. Raises ConfigError if it cannot be bound. `credentials` default
    to the MESHRL_TLS_ variables."""

    def __init__(self, config: ExchangeConfig, pool: RolloutPool, *, credentials: Credentials | None = None) -> None:
        self.workers: dict[str, DialedInWorker] = {}
        self._config = config
        self._pool = pool
        self._server = GrpcServer(config, credentials=credentials)
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> int:
        self._server.add(SERVICE, pb_grpc.add_RolloutExchangeServicer_to_server, self)
        port = await self._server.start()
        self._server.set_serving()
        self._looking = asyncio.create_task(self._check_leases())
        logger.info(f"rollout workers may dial in at {self._config.host}:{port}")
        return port

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for worker in self.workers.values():
            await worker.close()
        await self._server.drain(grace_s=0.0)

    def attach(self, hello: pb.WorkerHello, owner: str) -> tuple[DialedInWorker, WorkerStream]:
        """`owner` is the identity in the worker's credentials. Raises MeshError if it may not dial in."""
        worker = self.workers.get(hello.worker)
        if worker is None:
            worker = DialedInWorker(hello.worker, self._config)
            self.workers[hello.worker] = worker
        elif worker.owner != owner and (worker.attached or worker.silent_s < self._config.lease_s):
            raise MeshError(
                Reason.PERMISSION_DENIED,
                f"the name {hello.worker!r} is that of a worker of {worker.owner or 'another caller'}, seen"
                f" {worker.silent_s:.0f} s ago; set exchange.name to a name of its own",
            )
        worker.owner = owner
        is_new_process = worker.incarnation != hello.incarnation
        stream = worker.attach(hello)
        logger.info(
            f"worker {hello.worker!r} {'dialled in' if is_new_process else 'is back'}"
            f" with {', '.join(one.name for one in hello.environments)}, room for {hello.room} rollouts and"
            f" {len(hello.calls)} groups"
        )
        self._pool.join(worker, patience_s=self._config.wait_s, is_new_process=is_new_process)
        return worker, stream

    async def Attach(  # noqa: N802  # the name of the RPC
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.AttachResponse]:
        messages = aiter(request_iterator)
        worker, stream = self.attach(await _hello(messages), str(CALLER.get() or ""))
        reading = asyncio.create_task(_read(messages, worker, stream))
        try:
            while (answer := await stream.down.get()) is not None:
                yield answer
            if stream.closed_for is not None:
                raise stream.closed_for
        finally:
            reading.cancel()
            worker.detach(stream)

    async def ListWorkers(  # noqa: N802  # the name of the RPC
        self, request: pb.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListWorkersResponse:
        page, token = page_of(request, sorted(self.workers), str)
        workers = [self.workers[name] for name in page]
        listed = [worker.to_proto(self._pool.why_left_out(worker.address)) for worker in workers]
        return pb.ListWorkersResponse(workers=listed, next_page_token=token)

    async def _check_leases(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for worker in self.workers.values():
                worker.check_silence()


async def _hello(messages: AsyncIterator[pb.AttachRequest]) -> pb.WorkerHello:
    try:
        async with asyncio.timeout(HELLO_S):
            first = await anext(messages, None)
    except TimeoutError:
        raise MeshError(Reason.DEADLINE_PASSED, f"no hello came within {HELLO_S:g} s") from None
    if first is None or first.WhichOneof("message") != "hello":
        raise invalid([FieldViolation("hello", "must be the first message of the stream")], "the stream")
    return first.hello


async def _read(messages: AsyncIterator[pb.AttachRequest], worker: DialedInWorker, stream: WorkerStream) -> None:
    try:
        async for message in messages:
            worker.take_in(message, stream)
        stream.close(MeshError(Reason.CANCELLED, "the worker has ended its stream"))
    except MeshError as error:
        stream.close(error)
    except Exception as error:  # noqa: BLE001  # the boundary: a defect is told to the worker, and logged
        logger.opt(exception=error).error(f"the stream of worker {worker.name!r} failed")
        stream.close(MeshError(Reason.INTERNAL, f"{type(error).__name__}: {error}"))
