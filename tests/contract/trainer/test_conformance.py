"""`meshrl conformance` on a trainer: ours keeps every rule, and servers that break one are named by it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from conformance_kit import verdict
from grpc_servers import served
from meshrl.v1 import trainer_pb2 as pb
from meshrl.v1 import trainer_pb2_grpc as pb_grpc
from meshrl.wire.errors import MeshError, from_rpc_error
from served_trainer import Mesh


async def test_our_trainer_keeps_every_rule(mesh: Mesh) -> None:
    assert await verdict(mesh.address, "trainer", full=True) == ({}, {"trainer.revisions": BEFORE_ITS_FIRST_STEP})
    assert await verdict(mesh.address, "trainer") == ({}, {})  # now it has a history
    assert mesh.queue.book.step == 1  # the safe checks trained nothing


BEFORE_ITS_FIRST_STEP = "the run has no history yet; watch it after its first step, or with --full"


class Relayed(pb_grpc.TrainerServiceServicer):
    """Asks the real trainer for everything; a subclass breaks one thing on the way."""

    add_to: Any = staticmethod(pb_grpc.add_TrainerServiceServicer_to_server)

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.real: Any = pb_grpc.TrainerServiceStub(channel)  # type: ignore[no-untyped-call] # generated

    async def GetTrainer(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        return await _relay(self.real.GetTrainer(request))

    async def ListRuns(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        return await _relay(self.real.ListRuns(request))

    async def DeleteRun(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        return await _relay(self.real.DeleteRun(request))

    async def SaveCheckpoint(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        return await _relay(self.real.SaveCheckpoint(request))

    async def ListCheckpoints(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        return await _relay(self.real.ListCheckpoints(request))

    async def SubmitBatch(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        return await _relay(self.real.SubmitBatch([message async for message in request_iterator]))

    async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        try:
            async for event in self.real.WatchSteps(request):
                yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


async def _relay(pending: Any) -> Any:
    try:
        return await pending
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


class OfAnyContract(Relayed):
    """It does not read the version of its caller."""

    @staticmethod
    def add_to(servicer: Relayed, server: grpc.aio.Server) -> None:
        handler = grpc.unary_unary_rpc_method_handler(
            servicer.GetTrainer, lambda data: pb.GetTrainerRequest(), pb.GetTrainerResponse.SerializeToString
        )
        Relayed.add_to(servicer, server)
        server.add_registered_method_handlers("meshrl.v1.TrainerService", {"GetTrainer": handler})


class SkipsRevisions(Relayed):
    """Its revisions grow by two."""

    async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        async for event in super().WatchSteps(request, context):
            event.revision *= 2
            yield event


class SavesAgain(Relayed):
    """Each request for a checkpoint is a new one to it."""

    async def SaveCheckpoint(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        if request.request_id and not request.return_at_once:
            request.request_id += "-again" * (1 + request.weights_only)
        return await super().SaveCheckpoint(request, context)


class ListsFirstPagesOnly(Relayed):
    """Every page is its first."""

    async def ListCheckpoints(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        answer = await super().ListCheckpoints(request, context)
        if request.page_size:
            answer.next_page_token = ""
        return answer


class MarksNoBookmarks(Relayed):
    """Its bookmarks look like events."""

    async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        async for event in super().WatchSteps(request, context):
            event.bookmark = event.bookmark and not request.from_now
            yield event


class KeepsItsOldestSecret(Relayed):
    """Its error does not have the oldest revision."""

    async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        try:
            async for event in super().WatchSteps(request, context):
                yield event
        except MeshError as error:
            raise MeshError(error.reason, error.message) from error


@pytest.mark.parametrize(
    ("servicer", "rule"),
    [
        (OfAnyContract, "contract.major"),
        (SkipsRevisions, "trainer.step"),
        (SavesAgain, "trainer.save"),
        (ListsFirstPagesOnly, "trainer.checkpoints"),
        (MarksNoBookmarks, "trainer.bookmarks"),
        (KeepsItsOldestSecret, "trainer.expired"),
    ],
)
async def test_a_trainer_that_breaks_a_rule_is_named_by_it(mesh: Mesh, servicer: type[Relayed], rule: str) -> None:
    async with (
        grpc.aio.insecure_channel(mesh.address) as channel,
        served("meshrl.v1.TrainerService", servicer.add_to, servicer(channel)) as address,
    ):
        broken, _ = await verdict(address, "trainer", full=True)
    assert set(broken) == {rule}, broken
