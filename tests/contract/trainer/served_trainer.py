"""A trainer of one process behind its real server, in the process of the test, and batches for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.client import ChannelOptions, TrainerClient
from meshrl.core.config.shared import ServerConfig
from meshrl.core.rpc.serve import GrpcServer
from meshrl.trainer.runs.steps import StepBook, TrainingQueue
from meshrl.trainer.service import TrainerServicer
from meshrl.v1 import trainer_pb2 as pb
from meshrl.v1 import trainer_pb2_grpc as pb_grpc
from meshrl.wire.errors import MeshError, from_rpc_error
from meshrl.wire.types import Batch, StepEvent, StepState, TrainerInfo
from tiny_qwen3 import SHAPE
from trained import Trained
from training_loop import running

VOCAB = SHAPE["vocab_size"]


@dataclass(kw_only=True)
class Mesh:
    """A trainer behind its server."""

    client: TrainerClient
    queue: TrainingQueue
    address: str
    drained: asyncio.Event
    trained: Trained
    thread: threading.Thread

    async def until(self, state: StepState, step: int) -> StepEvent:
        async with asyncio.timeout(60.0):
            async for event in self.client.watch_steps():
                if (event.step, event.state) == (step, state):
                    return event
        raise AssertionError(f"the stream ended without {state} of step {step}")

    async def refused(self, batch: Batch) -> MeshError:
        with pytest.raises(MeshError) as caught:
            await self.client.submit_batch(batch)
        return caught.value

    async def upload(self, messages: Sequence[pb.SubmitBatchRequest]) -> MeshError:
        """Sends messages as they are; returns the error that they meet."""

        async def stream() -> AsyncIterator[pb.SubmitBatchRequest]:
            for message in messages:
                yield message

        async with grpc.aio.insecure_channel(self.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await pb_grpc.TrainerServiceStub(channel).SubmitBatch(stream())  # type: ignore[no-untyped-call] # generated
        return from_rpc_error(caught.value)


def trainer_info(*, dp_size: int, max_queued_batches: int) -> TrainerInfo:
    return TrainerInfo(
        world_size=1,
        dp_size=dp_size,
        seq_len=32,
        pad_multiple=1,
        objective="aipo",
        model="tiny",
        runs=(),
        max_queued_batches=max_queued_batches,
        vocab_size=VOCAB,
    )


@asynccontextmanager
async def serving(output_dir: Path, *, dp_size: int = 1) -> AsyncIterator[Mesh]:
    """A trainer of one process, whatever it says of its `dp_size`, that keeps its checkpoints in `output_dir`."""
    book = StepBook(run_id="main", epoch=7, max_queued=1, checkpoints=output_dir / "checkpoints")
    async with running(output_dir, book=book) as trainer:
        drained, server = asyncio.Event(), GrpcServer(ServerConfig(port=0))
        info = trainer_info(dp_size=dp_size, max_queued_batches=1)
        servicer = TrainerServicer(trainer.table, info, on_drained=drained.set)
        server.add("meshrl.v1.TrainerService", pb_grpc.add_TrainerServiceServicer_to_server, servicer)
        address = f"127.0.0.1:{await server.start()}"
        server.set_serving()
        async with TrainerClient(address, ChannelOptions(reconnect_s=1.0)) as client:
            yield Mesh(
                client=client,
                queue=trainer.queue,
                address=address,
                drained=drained,
                trained=trainer.trained,
                thread=trainer.thread,
            )
        trainer.queue.close()
        await server.drain(1.0)


def batch(step: int, *, advantage: float = 1.0, run_id: str = "", token: int = 3, length: int | None = None) -> Batch:
    """One row of two samples, 10 tokens in all; or of one sample of `length` tokens."""
    tokens = np.array([1, 2, token, 4, 5], np.int32) if length is None else np.arange(length, dtype=np.int32) % VOCAB
    sample = TrainSample(
        token_ids=tokens,
        loss_mask=np.arange(len(tokens)) >= 2,
        logprobs=np.full(len(tokens), -2.0, np.float32),
        advantage=advantage,
        rollout_id="r",
    )
    packing = pack_samples([sample] * (2 if length is None else 1), seq_len=max(32, len(tokens)))
    return Batch(
        run_id=run_id,
        step=step,
        micro_batches=packing.micro_batches,
        loss_tokens=packing.loss_tokens,
        environments=("env",),
    )
