"""Calls that arrive while the server's event loop is busy wait for it: none is dropped by gRPC itself."""

import asyncio
import time

import grpc
import pytest

from grpc_servers import served
from meshrl.core.rpc import serve
from meshrl.core.rpc.serve import DEFAULT_MAX_MESSAGE_BYTES, server_options
from meshrl.v1 import trainer_pb2, trainer_pb2_grpc

# ruff: noqa: N802  # methods are named by the contract


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers at once."""

    def __init__(self):
        self.answered = 0

    async def GetTrainer(self, request, context):
        self.answered += 1
        return trainer_pb2.GetTrainerResponse()


async def codes_after_a_block(num_calls, block_s):
    """Makes calls whose server's event loop does nothing for `block_s`; returns how each ended.

    The callers are threads of gRPC's own, so the calls reach the server although the loop is blocked.
    """
    trainer, adder = Trainer(), trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    async with served("meshrl.v1.TrainerService", adder, trainer) as address:
        with grpc.insecure_channel(address) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            await asyncio.to_thread(lambda: stub.GetTrainer(trainer_pb2.GetTrainerRequest(), timeout=60.0))
            calls = [stub.GetTrainer.future(trainer_pb2.GetTrainerRequest(), timeout=100.0) for _ in range(num_calls)]
            time.sleep(block_s)  # noqa: ASYNC251  # the block is what is tested
            codes = await asyncio.to_thread(lambda: [call.code() for call in calls])
    assert trainer.answered == 1 + codes.count(grpc.StatusCode.OK)
    return codes


async def test_a_burst_of_calls_waits_for_a_busy_server():
    codes = await codes_after_a_block(4000, 1.0)
    assert {code.name: codes.count(code) for code in set(codes)} == {"OK": 4000}


@pytest.mark.parametrize(("limit_s", "lost"), [(1, True), (serve.MAX_UNREQUESTED_S, False)])
async def test_a_call_waits_for_as_long_as_the_server_lets_it(monkeypatch, limit_s, lost):
    """gRPC cancels what has waited for longer than the limit, by default 30 s. Ours is beyond every deadline."""
    monkeypatch.setattr(serve, "MAX_UNREQUESTED_S", limit_s)
    assert ("grpc.server_max_unrequested_time_in_server", limit_s) in server_options(DEFAULT_MAX_MESSAGE_BYTES, 5.0)
    codes = await codes_after_a_block(20, 3.0)
    assert (grpc.StatusCode.CANCELLED in codes) is lost
    assert lost or limit_s >= 24 * 3600
