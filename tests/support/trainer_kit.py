"""What tests of the trainer program share: a tiny model, free ports, and a version's tensors as a hub holds them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from opentelemetry import trace

from local_ports import free_port
from meshrl.client import TrainerClient, WeightSyncClient
from meshrl.core.config.shared import ServerConfig
from meshrl.trainer.config import TrainerConfig
from meshrl.trainer.program import serve
from meshrl.versions.layout import TORCH_DTYPES
from meshrl.weights.config import WeightsConfig
from meshrl.weights.main import serve as serve_hub
from meshrl.wire.errors import MeshError
from meshrl.wire.types import StepEvent, StepState, TensorEntry
from tiny_qwen3 import SHAPE, save_tiny_qwen3

VOCAB = SHAPE["vocab_size"]
UP_S = 150.0  # ranks import torch side by side, beside whatever other tests do


def save_tiny_model(folder: Path) -> str:
    return save_tiny_qwen3(folder, num_hidden_layers=2)


@asynccontextmanager
async def running_hub(output_dir: Path) -> AsyncIterator[str]:
    """A real hub in this process; gives its address."""
    port, stop = free_port(), asyncio.Event()
    config = WeightsConfig(server=ServerConfig(port=port), output_dir=output_dir)
    serving = asyncio.create_task(serve_hub(config, stop, trace.NoOpTracer()))
    yield f"127.0.0.1:{port}"
    stop.set()
    assert await serving == 0


async def up(client: TrainerClient, alive: Callable[[], bool] = lambda: True, deadline_s: float = UP_S) -> None:
    """Until the trainer answers; fails at once when it is not alive any more."""
    async with asyncio.timeout(deadline_s):
        while True:
            try:
                await client.get_trainer()
            except MeshError:  # still loading
                assert alive(), "the trainer ended early"
                await asyncio.sleep(0.05)
            else:
                return


@asynccontextmanager
async def one_rank(config: TrainerConfig) -> AsyncIterator[TrainerClient]:
    """A trainer of one process, in this one."""
    stop = asyncio.Event()
    running = asyncio.create_task(serve(config, stop, trace.NoOpTracer()))
    try:
        async with TrainerClient(config.server.address) as client:
            await up(client, lambda: not running.done())
            yield client
    finally:  # a training thread that outlives its test ends the process by a signal
        stop.set()
        code = await asyncio.wait_for(running, 60.0)
    assert code == 0


async def until(
    client: TrainerClient, state: StepState, step: int, *, after_revision: int = 0, run_id: str = ""
) -> StepEvent:
    """Waits for an event of a step."""
    async with asyncio.timeout(UP_S):
        async for event in client.watch_steps(run_id, after_revision=after_revision):
            if (event.step, event.state) == (step, state):
                return event
    raise AssertionError(f"no {state} for step {step}")


async def published(hub: str, version: int) -> dict[str, NDArray[np.float32]]:
    """A version's tensors by name, their values in float32 whatever type they have on the wire."""
    async with WeightSyncClient(hub) as client:
        manifest, artifact_id = await client.get_manifest("main", version)
        data = bytearray(b"".join([bytes(chunk.data) async for chunk in client.fetch(artifact_id)]))

    def values(entry: TensorEntry) -> NDArray[np.float32]:
        count, dtype = math.prod(entry.shape), TORCH_DTYPES[entry.dtype]
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.offset)
        return flat.reshape(entry.shape).float().numpy()

    return {entry.name: values(entry) for entry in manifest.tensors}
