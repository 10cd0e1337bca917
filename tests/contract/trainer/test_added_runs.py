"""The trainer program with runs beside its own: added, published at a real hub, brought back after a kill, deleted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import ranked_trainer
from meshrl.client import TrainerClient, WeightSyncClient
from meshrl.training.config import CheckpointConfig
from meshrl.training.model_config import LoraConfig
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AdapterSpec, RunPhase, RunSpec, StartPoint, StepState
from trainer_kit import UP_S, running_hub, save_tiny_model, until

SMALL = RunSpec(adapter=AdapterSpec(rank=4, alpha=8.0, target_modules=("q_proj",)), seed=5, share=2.0)


async def train(client: TrainerClient, run_id: str, step: int) -> None:
    await client.submit_batch(replace(ranked_trainer.batch(step, ranks=1), run_id=run_id))
    await until(client, StepState.DONE, step, run_id=run_id)


async def shapes(hub: str, run_id: str, version: int) -> set[tuple[int, ...]]:
    async with WeightSyncClient(hub) as client:
        manifest, _ = await client.get_manifest(run_id, version)
        return {entry.shape for entry in manifest.tensors}


async def test_added_runs_train_publish_come_back_after_a_kill_and_go(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    async with running_hub(tmp_path / "hub") as hub:
        plain = ranked_trainer.configure(tmp_path / "out", model, hub, ranks=1)
        lora = plain.model.model_copy(update={"lora": LoraConfig(rank=8)})
        changed = {"model": lora, "max_concurrent_runs": 2, "ckpt": CheckpointConfig(interval=1)}
        config = plain.model_copy(update=changed)
        async with ranked_trainer.two_ranks(config) as program:
            client = program.client
            assert (await client.get_trainer()).max_runs == 3
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
        async with ranked_trainer.two_ranks(again) as program:
            client = program.client
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
            await client.drain()
            assert program.exit_code(UP_S) == 0
