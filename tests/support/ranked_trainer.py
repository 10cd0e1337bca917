"""The `trainer` program with two ranks as a user starts it, and batches for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from local_ports import free_port
from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.client import TrainerClient
from meshrl.core.config import dump_toml
from meshrl.core.config.shared import ServerConfig, WeightBroadcastConfig
from meshrl.trainer.config import TrainerConfig
from meshrl.training.config import OptimConfig
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.deployment import DeploymentConfig
from meshrl.wire.types import Batch
from trainer_kit import VOCAB, up

Transport = Literal["auto", "filesystem", "nccl", "stream"]


@dataclass
class Program:
    """A running `trainer` with two ranks."""

    process: subprocess.Popen[bytes]
    client: TrainerClient
    output_dir: Path
    console: Path

    def rank_log(self, rank: int, stream: str = "stdout") -> str:
        (path,) = (self.output_dir / "logs/trainer/torchrun").glob(f"*/attempt_0/{rank}/{stream}.log")
        return path.read_text()

    def rank_pids(self) -> list[int]:
        return children(self.process.pid)

    def rank_pid(self, rank: int) -> int:
        (pid,) = (pid for pid in self.rank_pids() if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text())
        return pid

    def exit_code(self, within_s: float) -> int:
        return self.process.wait(within_s)


def children(parent: int) -> list[int]:
    """Ids of the processes that a process has started."""
    listed = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, timeout=60.0, check=True)
    pairs = [map(int, line.split()) for line in listed.stdout.splitlines()]
    return sorted(pid for pid, of in pairs if of == parent)


def configure(
    output_dir: Path, model: str, hub: str, *, ranks: int, device: str = "cpu", transport: Transport = "stream"
) -> TrainerConfig:
    return TrainerConfig(
        model=TrainerModelConfig(name=model, device=device),
        server=ServerConfig(port=free_port()),
        optim=OptimConfig(lr=1e-2),
        deployment=DeploymentConfig(num_train_gpus=ranks),
        seq_len=32,
        torch_threads=1,
        weight_broadcast=WeightBroadcastConfig(
            type=transport,
            address=hub,
            chunk_bytes=4096,
            bucket_mib=1 if transport == "nccl" else 256,
            transfer_deadline_s=30.0,
        ),
        output_dir=output_dir,
    )


def batch(step: int, *, ranks: int, bad_rank: int | None = None) -> Batch:
    source = np.random.default_rng(step)
    samples = [
        TrainSample(
            token_ids=source.integers(0, VOCAB, 10 + index, dtype=np.int32),
            loss_mask=np.arange(10 + index) >= 2,
            logprobs=np.full(10 + index, -2.7, np.float32),
            advantage=float(source.normal()),
            env_index=index % 2,
        )
        for index in range(6)
    ]
    packing = pack_samples(samples, seq_len=32, dp_size=ranks)
    for row in packing.micro_batches:
        if row.dp_rank == bad_rank:
            row.advantages[row.loss_mask] = 3e38  # finite, but its gradient is not
    return Batch(
        run_id="",
        step=step,
        micro_batches=packing.micro_batches,
        loss_tokens=packing.loss_tokens,
        environments=("a", "b"),
    )


def start(config: TrainerConfig, console: Path, *, by: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    file = config.output_dir / "trainer.toml"
    dump_toml(config, file)
    with console.open("wb") as out:
        return subprocess.Popen(
            [*by, sys.executable, "-m", "meshrl.trainer.main", "@", str(file)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


@asynccontextmanager
async def two_ranks(config: TrainerConfig, *, by: Sequence[str] = ()) -> AsyncIterator[Program]:
    config.output_dir.mkdir(exist_ok=True)
    console = config.output_dir / "console.txt"
    process = start(config, console, by=by)
    try:
        async with TrainerClient(config.server.address) as client:
            await up(client, lambda: process.poll() is None)
            yield Program(process, client, config.output_dir, console)
    finally:
        process.kill()
        process.wait(60.0)


async def gone(pids: list[int], within_s: float) -> bool:
    def alive(pid: int) -> bool:
        stat = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, timeout=60.0
        ).stdout
        return bool(stat.strip()) and not stat.strip().startswith("Z")

    end = time.monotonic() + within_s
    while any(map(alive, pids)):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.1)
    return True
