"""The trainer program as two ranks (gloo, CPU), through the real client and a real hub."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from opentelemetry import trace

from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.client import TrainerClient
from meshrl.core.config import dump_toml
from meshrl.core.config.shared import ServerConfig, WeightBroadcastConfig
from meshrl.trainer.config import TrainerConfig
from meshrl.trainer.program import serve
from meshrl.training.config import OptimConfig
from meshrl.training.deployment import DeploymentConfig
from meshrl.training.model_config import TrainerModelConfig
from meshrl.wire.types import Batch, StepState
from trainer_kit import VOCAB, free_port, published, running_hub, until, up

STEPS = 3


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
        listed = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, timeout=10, check=True)
        pairs = [map(int, line.split()) for line in listed.stdout.splitlines()]
        return sorted(pid for pid, parent in pairs if parent == self.process.pid)

    def exit_code(self, within_s: float) -> int:
        return self.process.wait(within_s)


def configure(output_dir: Path, model: str, hub: str, *, ranks: int) -> TrainerConfig:
    return TrainerConfig(
        model=TrainerModelConfig(name=model, device="cpu"),
        server=ServerConfig(port=free_port()),
        optim=OptimConfig(lr=1e-2),
        deployment=DeploymentConfig(num_train_gpus=ranks),
        seq_len=32,
        torch_threads=1,
        weight_broadcast=WeightBroadcastConfig(type="stream", address=hub, chunk_bytes=4096),
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


def start(config: TrainerConfig, console: Path) -> subprocess.Popen[bytes]:
    file = config.output_dir / "trainer.toml"
    dump_toml(config, file)
    with console.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "meshrl.trainer.main", "@", str(file)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


@asynccontextmanager
async def two_ranks(config: TrainerConfig) -> AsyncIterator[Program]:
    config.output_dir.mkdir()
    console = config.output_dir / "console.txt"
    process = start(config, console)
    try:
        async with TrainerClient(config.server.address) as client:
            await up(client, lambda: process.poll() is None)
            yield Program(process, client, config.output_dir, console)
    finally:
        process.kill()
        process.wait(10)


@asynccontextmanager
async def one_rank(config: TrainerConfig) -> AsyncIterator[TrainerClient]:
    stop = asyncio.Event()
    running = asyncio.create_task(serve(config, stop, trace.NoOpTracer()))
    async with TrainerClient(config.server.address) as client:
        await up(client)
        yield client
    stop.set()
    assert await asyncio.wait_for(running, 30) == 0


async def reference(folder: Path, model: str) -> tuple[dict[str, NDArray[np.float32]], dict[str, float]]:
    """The same steps on one rank: the last version and its metrics."""
    async with running_hub(folder / "hub") as hub, one_rank(configure(folder, model, hub, ranks=1)) as client:
        for step in range(1, STEPS + 1):
            await client.submit_batch(batch(step, ranks=1))
            event = await until(client, StepState.DONE, step)
        return await published(hub, STEPS), dict(event.metrics)


async def gone(pids: list[int], within_s: float) -> bool:
    def alive(pid: int) -> bool:
        stat = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, timeout=10).stdout
        return bool(stat.strip()) and not stat.strip().startswith("Z")

    end = time.monotonic() + within_s
    while any(map(alive, pids)):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.1)
    return True


async def test_two_ranks_train_as_one_survive_a_bad_batch_and_drain(tmp_path: Path, model: str, hub: str) -> None:
    async with two_ranks(configure(tmp_path / "two", model, hub, ranks=2)) as program:
        client = program.client
        info = await client.get_trainer()
        assert (info.world_size, info.dp_size) == (2, 2)
        await client.submit_batch(batch(1, ranks=2, bad_rank=1))
        failed = await until(client, StepState.FAILED, 1)
        assert failed.reason == "STEP_FAILED"
        assert "not finite" in failed.message
        for step in range(1, STEPS + 1):
            await client.submit_batch(batch(step, ranks=2))
            event = await until(client, StepState.DONE, step, after_revision=failed.revision)
        pids = program.rank_pids()
        assert len(pids) == 2
        program.process.send_signal(signal.SIGTERM)
        assert program.exit_code(20) == 0, program.console.read_text()
        assert await gone(pids, 1)
        assert "not finite" in program.rank_log(1)
        log = (program.output_dir / "logs/trainer.log").read_text()
        assert len(re.findall(r"step \d \| loss", log)) == STEPS
        assert "finished at version 3" in program.console.read_text()

    ours = await published(hub, STEPS)
    theirs, expected = await reference(tmp_path / "one", model)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor, theirs[name], atol=1e-5, rtol=1e-5, err_msg=name)
    start = await published(hub, 0)
    assert max(np.abs(ours[name] - start[name]).max() for name in ours) > 1e-3
    for name in ("loss/mean", "optim/grad_norm", "entropy/all/mean", "entropy/b/mean", "mismatch_kl/a/max"):
        assert event.metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


async def test_two_nodes_started_by_hand_with_torchrun_are_one_trainer(tmp_path: Path, model: str, hub: str) -> None:
    config, endpoint = configure(tmp_path / "two", model, hub, ranks=1), f"127.0.0.1:{free_port()}"
    dump_toml(config, tmp_path / "trainer.toml")
    nodes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}",
            f"--rdzv-endpoint={endpoint}", "-m", "meshrl.trainer.main", "@", str(tmp_path / "trainer.toml"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for node in (0, 1)
    ]  # fmt: skip
    async with TrainerClient(config.server.address) as client:
        await up(client, lambda: all(node.returncode is None for node in nodes))
        assert (await client.get_trainer()).world_size == 2
        await client.submit_batch(batch(1, ranks=2))
        assert (await until(client, StepState.DONE, 1)).version == 1
        assert await client.drain() == 1
        assert [await asyncio.wait_for(node.wait(), 30) for node in nodes] == [0, 0]


@pytest.mark.parametrize("victim", [0, 1], ids=["first started", "last started"])
async def test_a_killed_rank_ends_the_whole_trainer_within_seconds(
    tmp_path: Path, model: str, hub: str, victim: int
) -> None:
    async with two_ranks(configure(tmp_path / "two", model, hub, ranks=2)) as program:
        await program.client.submit_batch(batch(1, ranks=2))
        await until(program.client, StepState.DONE, 1)
        pids = program.rank_pids()
        os.kill(pids[victim], signal.SIGKILL)
        assert await asyncio.to_thread(program.exit_code, 15) != 0
        assert await gone(pids, 1)
        assert "was killed by SIGKILL" in program.console.read_text()
