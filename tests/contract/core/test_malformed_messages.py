"""Bytes that are no message of the method are refused as such, on every kind of call, and leave no traceback."""

import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace

import grpc
import pytest
from loguru import logger

from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.serve import GrpcServer
from meshrl.v1 import rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc, weights_pb2_grpc
from meshrl.wire.errors import Reason, from_rpc_error

MALFORMED = b"\x0a\xff\x01"  # field 1 claims 255 bytes and none follow
NOT_UTF8 = b"\x0a\x02\xff\xfe"

METHODS = [
    "meshrl.v1.TrainerService/GetTrainer",
    "meshrl.v1.RolloutService/RunRollouts",
    "meshrl.v1.TrainerService/SubmitBatch",
    "meshrl.v1.WeightSync/Session",
    "grpc.health.v1.Health/Check",
    "grpc.health.v1.Health/Watch",
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]
# ruff: noqa: N802  # methods are named by the contract


class Reader(
    rollout_pb2_grpc.RolloutServiceServicer,
    trainer_pb2_grpc.TrainerServiceServicer,
    weights_pb2_grpc.WeightSyncServicer,
):
    """Reads every message that it is sent and answers once there are no more."""

    def __init__(self):
        self.received = []

    async def GetTrainer(self, request, context):
        self.received.append(request)
        return trainer_pb2.GetTrainerResponse()

    async def RunRollouts(self, request, context):
        self.received.append(request)
        return
        yield

    async def SubmitBatch(self, request_iterator, context):
        async for message in request_iterator:
            self.received.append(message)
        return trainer_pb2.SubmitBatchResponse(revision=len(self.received))

    async def Session(self, request_iterator, context):
        async for message in request_iterator:
            self.received.append(message)
        return
        yield


@pytest.fixture
async def reader(caplog: pytest.LogCaptureFixture) -> AsyncIterator[SimpleNamespace]:
    server, servicer = GrpcServer(ServerConfig()), Reader()
    server.add("meshrl.v1.RolloutService", rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer)
    server.add("meshrl.v1.TrainerService", trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer)
    server.add("meshrl.v1.WeightSync", weights_pb2_grpc.add_WeightSyncServicer_to_server, servicer)
    port = await server.start()
    server.set_serving()
    errors = []
    sink = logger.add(lambda line: errors.append(str(line)), level="ERROR")
    with caplog.at_level(logging.ERROR):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield SimpleNamespace(channel=channel, servicer=servicer, errors=errors, caplog=caplog)
    logger.remove(sink)
    await server.drain(0.0)


async def refusal_of(channel, method, *messages):
    """The error that ends a call whose messages are `messages`; all kinds of calls are alike on the wire."""

    async def outgoing():
        for message in messages:
            yield message

    call = channel.stream_stream(f"/{method}")(outgoing(), timeout=60.0)
    with pytest.raises(grpc.aio.AioRpcError) as seen:
        async for _ in call:
            pass
    return seen.value


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("message", [MALFORMED, NOT_UTF8, b"\xff" * 300], ids=["cut", "text", "noise"])
async def test_malformed_bytes_are_an_invalid_request_without_a_traceback(reader, method, message):
    refused = await refusal_of(reader.channel, method, message)
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(refused)
    assert error.reason is Reason.INVALID_REQUEST
    assert method in error.message
    assert reader.errors == []
    assert reader.caplog.records == []
    assert reader.servicer.received == []


ONE_MESSAGE = [method for method in METHODS if not method.endswith(("SubmitBatch", "Session", "ServerReflectionInfo"))]


@pytest.mark.parametrize("method", ONE_MESSAGE)
async def test_a_call_without_its_message_is_an_invalid_request(reader, method):
    refused = await refusal_of(reader.channel, method)
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc_error(refused).message == f"{method} was called without a message; send one"
    assert reader.errors == []


@pytest.mark.parametrize("method", ["meshrl.v1.TrainerService/SubmitBatch", "meshrl.v1.WeightSync/Session"])
async def test_a_stream_that_turns_malformed_is_refused_after_its_sound_messages(reader, method):
    refused = await refusal_of(reader.channel, method, b"", MALFORMED)
    assert from_rpc_error(refused).reason is Reason.INVALID_REQUEST
    assert len(reader.servicer.received) == 1
    assert reader.errors == []


async def test_the_server_answers_on_after_malformed_bytes(reader):
    for method in METHODS * 5:
        await refusal_of(reader.channel, method, MALFORMED)
    trainer = trainer_pb2_grpc.TrainerServiceStub(reader.channel)
    await trainer.GetTrainer(trainer_pb2.GetTrainerRequest(contract_version="1.0"), timeout=60.0)
    assert [message.contract_version for message in reader.servicer.received] == ["1.0"]
