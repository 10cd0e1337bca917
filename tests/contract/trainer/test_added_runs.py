"""The trainer program with runs beside its own: added, published at a real hub, brought back after a kill, deleted."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import ranked_trainer
from local_ports import free_port
from meshrl.client import TrainerClient, WeightSyncClient
from meshrl.core.config import dump_toml
from meshrl.trainer.config import TrainerConfig
from meshrl.training.config import CheckpointConfig
from meshrl.training.model_config import LoraConfig
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AdapterSpec, RunPhase, RunSpec, StartPoint, StepState
from trainer_kit import UP_S, running_hub, save_tiny_model, until, up

SMALL = RunSpec(adapter=AdapterSpec(rank=4, alpha=8.0, target_modules=("q_proj",)), seed=5, share=2.0)


async def train(client: TrainerClient, run_id: str, step: int) -> None:
    ranks = (await client.get_trainer()).dp_size
    await client.submit_batch(replace(ranked_trainer.batch(step, ranks=ranks), run_id=run_id))
    await until(client, StepState.DONE, step, run_id=run_id)


async def shapes(hub: str, run_id: str, version: int) -> set[tuple[int, ...]]:
    async with WeightSyncClient(hub) as client:
        manifest, _ = await client.get_manifest(run_id, version)
        return {entry.shape for entry in manifest.tensors}


@asynccontextmanager
async def two_nodes(config: TrainerConfig, file: Path) -> AsyncIterator[TrainerClient]:
    """Started by hand with torchrun; they drain at the end."""
    endpoint = f"127.0.0.1:{free_port()}"
    dump_toml(config, file)
    nodes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}",
            f"--rdzv-endpoint={endpoint}", "-m", "meshrl.trainer.main", "@", str(file),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for node in (0, 1)
    ]  # fmt: skip
    try:
        async with TrainerClient(config.server.address) as client:
            await up(client, lambda: all(node.returncode is None for node in nodes))
            await client.wait_until_serving(UP_S)  # by then the runs of the last start are back
            assert (await client.get_trainer()).world_size == 2
            yield client
            await client.drain()
            assert [await asyncio.wait_for(node.wait(), UP_S) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            if node.returncode is None:
                node.kill()


async def test_added_runs_train_publish_come_back_after_a_kill_on_two_nodes_and_go(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    async with running_hub(tmp_path / "hub") as hub:
        plain = ranked_trainer.configure(tmp_path / "out", model, hub, ranks=1)
        lora = plain.model.model_copy(update={"lora": LoraConfig(rank=8)})
        changed = {"model": lora, "max_concurrent_runs": 2, "ckpt": CheckpointConfig(interval=1)}
        config = plain.model_copy(update=changed)
        async with ranked_trainer.two_ranks(config) as program:
            client = program.client
            first = await client.get_trainer()  # while it starts
            assert (first.max_runs, first.default_adapter and first.default_adapter.rank) == (3, 8)
            made = await client.create_run("small", SMALL)
            assert made.spec is not None
            assert made.spec.adapter == replace(SMALL.adapter, seed=5)
            await client.create_run("plain")
            with pytest.raises(MeshError) as full:
                await client.create_run("third")
            assert full.value.reason is Reason.RUN_LIMIT_REACHED
            for step in (1, 2):
                await train(client, "small", step)
            await train(client, "plain", 1)
            await train(client, "main", 1)
            assert await shapes(hub, "small", 2) == {(4, 16), (16, 4)}
            assert (8, 16) in await shapes(hub, "plain", 1)
            suspended = await client.suspend_run("plain", "to look at it")
            assert suspended.phase is RunPhase.SUSPENDED
            with pytest.raises(MeshError, match="is suspended: to look at it"):
                await train(client, "plain", 2)
            for run in await client.list_runs():  # a step is done before its checkpoint is on disk
                await client.save_checkpoint(run.run_id)
        again = config.model_copy(update={"ckpt": CheckpointConfig(interval=1, resume_step=-1)})
        async with two_nodes(again, tmp_path / "trainer.toml") as client:
            runs = {run.run_id: run for run in await client.list_runs()}
            assert {name: run.step for name, run in runs.items()} == {"main": 1, "small": 2, "plain": 1}
            assert runs["plain"].phase is RunPhase.SUSPENDED
            await client.resume_run("plain")
            await train(client, "plain", 2)
            await train(client, "small", 3)
            await client.delete_run("small")
            with pytest.raises(MeshError) as gone:
                await client.get_run("small")
            assert gone.value.reason is Reason.UNKNOWN_RUN
            async with WeightSyncClient(hub) as weights:
                with pytest.raises(MeshError):
                    await weights.get_manifest("small", 3)
            assert not (config.output_dir / "runs/small").exists()
            await client.save_checkpoint("plain")
            goes_on = StartPoint(run_id="plain", step=2, with_optimizer=True)
            fork = await client.create_run("fork", RunSpec(start_from=goes_on))
            assert (fork.step, fork.durable_step, fork.spec and fork.spec.start_from) == (2, 2, goes_on)
            await train(client, "fork", 3)
            assert (8, 16) in await shapes(hub, "fork", 3)
            await client.delete_run("fork")
            weights_alone = await client.create_run("fork", RunSpec(start_from=StartPoint(run_id="main")))
            assert (weights_alone.step, weights_alone.spec and weights_alone.spec.start_from) == (
                0, StartPoint(run_id="main", step=1),
            )  # fmt: skip
            await train(client, "fork", 1)
