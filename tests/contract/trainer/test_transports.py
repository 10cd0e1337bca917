"""Versions that leave the trainer program over each transport: what the engine serves is what the trainer has."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import polling
from inference_kit import ask, complete, full_forward
from meshrl.client import TrainerClient, WeightSyncClient
from meshrl.core.config.shared import ModelConfig
from meshrl.core.private_folders import versions_folder
from meshrl.models.load import load_model
from meshrl.models.state import hf_state
from meshrl.trainer.publishing.transport_choice import first_engines
from meshrl.training.config import OptimConfig
from meshrl.training.model_config import LoraConfig
from meshrl.wire.types import EngineInfo, StepState, VersionKind
from ranked_trainer import Program, Transport, batch, configure, gone, two_ranks
from served_engine import activate, serving_engine
from tiny_families import tiny_model
from trainer_kit import one_rank, until

PROMPT = [1, 2, 3]


async def train(client: TrainerClient, steps: int, *, ranks: int) -> Path:
    """Makes the steps and returns a folder with the weights after them, which come from a gather."""
    for step in range(1, steps + 1):
        await client.submit_batch(batch(step, ranks=ranks))
        event = await until(client, StepState.DONE, step)
        assert event.metrics["time/publish"] > 0
    return (await client.save_checkpoint(weights_only=True))[1]


@pytest.mark.parametrize("transport", ["filesystem", "nccl", "stream"])
async def test_engine_serves_the_trainers_weights_to_the_bit(
    tmp_path: Path, model: str, hub: str, transport: Transport
) -> None:
    config = configure(tmp_path / "out", model, hub, ranks=1, transport=transport)
    async with serving_engine(model, hub) as served, one_rank(config) as client:
        folder = await train(client, 2, ranks=1)
        activation, manifest = await activate(hub, 2)
        assert manifest.transport.value == transport
        assert served.differs_from(folder) == []
        assert activation.engines[0].applied.root == manifest.result_root


async def kill_the_agent(program: Program) -> None:
    """Its ranks end, and its versions that are files in memory are removed."""
    folder = versions_folder(program.output_dir)
    assert await asyncio.to_thread(folder.is_dir)
    ranks = program.rank_pids()
    program.process.kill()
    await polling.until(lambda: not folder.exists())
    assert await gone(ranks, 60.0)


async def kill_rank(program: Program, rank: int) -> None:
    """The whole trainer ends, and says which of its ranks was killed."""
    pids = program.rank_pids()
    os.kill(program.rank_pid(rank), signal.SIGKILL)
    assert await asyncio.to_thread(program.exit_code, 60.0) != 0
    assert await gone(pids, 60.0)
    assert f"rank {rank} of trainer was killed by SIGKILL" in program.console.read_text()


class Divided(NamedTuple):
    """Ranks that divide rows, experts and layers, and how they die."""

    ranks: int
    model: dict[str, Any]
    dies: Callable[[Program], Awaitable[None]]
    kind: VersionKind = VersionKind.FULL

    @property
    def dp_size(self) -> int:
        return self.ranks // int(self.model.get("tp", 1))


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DIVIDED: dict[Transport, Divided] = {
    "filesystem": Divided(2, {}, kill_the_agent),
    "nccl": Divided(  # the ranks merge an adapter into their rows, and each has those of its experts
        4,
        {"ep": 2, "lora": LoraConfig(rank=8, alpha=16.0, target_modules=["q_proj"], target_parameters=EXPERTS)},
        partial(kill_rank, rank=0),
    ),
    "stream": Divided(2, {"tp": 2, "ep": 2}, partial(kill_rank, rank=1), VersionKind.DELTA),
}


@pytest.mark.parametrize("transport", DIVIDED)
async def test_the_engine_has_what_all_ranks_divide_and_what_follows_their_death_is_of_a_new_epoch(
    tmp_path: Path, model: str, hub: str, transport: Transport
) -> None:
    divided = DIVIDED[transport]
    if divided.model:
        tiny_model("qwen3_moe").save_pretrained(model := str(tmp_path / "mixture"))
    config = configure(tmp_path / "out", model, hub, ranks=divided.ranks, transport=transport)
    merged = config.weight_broadcast.model_copy(update={"lora_adapter_only": False})
    changed = {"model": config.model.model_copy(update=divided.model), "weight_broadcast": merged}
    if divided.kind is VersionKind.DELTA:
        changed["optim"] = OptimConfig(lr=1e-9)  # changes few bits, so deltas pay
    async with serving_engine(model, hub) as served:
        async with two_ranks(config.model_copy(update=changed)) as program:
            folder = await train(program.client, 2, ranks=divided.dp_size)
            _, manifest = await activate(hub, 2)
            assert served.differs_from(folder) == []
            assert manifest.kind is divided.kind
            if manifest.collective is not None:
                assert manifest.collective.num_senders == divided.ranks
                assert len(manifest.collective.reordered_tensors) == 4  # of two layers' experts
            log = program.output_dir / "logs/trainer.log"
            # An engine may serve it before the trainer has heard so and says it.
            await polling.until(lambda log=log: "version 2 is published" in log.read_text())
            before = {name: tensor.clone() for name, tensor in hf_state(served.model).items()}
            await program.client.submit_batch(batch(3, ranks=divided.dp_size))
            await until(program.client, StepState.RUNNING, 3)
            assert len(program.rank_pids()) == divided.ranks
            await divided.dies(program)
        live = hf_state(served.model)
        assert all(torch.equal(live[name], tensor) for name, tensor in before.items())
        await asyncio.to_thread(shutil.move, tmp_path / "out", tmp_path / "first")
        again = configure(tmp_path / "out", model, hub, ranks=1, transport=transport)
        (tmp_path / "out").mkdir()
        await asyncio.to_thread(shutil.copy, tmp_path / "first/trainer_epoch", tmp_path / "out/trainer_epoch")
        async with one_rank(again) as client:
            folder = await train(client, 1, ranks=1)
            _, manifest = await activate(hub, 1)
            assert manifest.epoch == 2
            assert served.differs_from(folder) == []


async def test_the_start_looks_for_a_first_engine_several_times_a_second(hub: str) -> None:
    looks: list[float] = []

    class Watched(WeightSyncClient):
        async def list_engines(
            self, engine_pool: str = "", *, deadline_s: float | None = None
        ) -> tuple[EngineInfo, ...]:
            looks.append(time.monotonic())
            return await super().list_engines(engine_pool)

    async with Watched(hub) as client:
        assert await first_engines(client, deadline_s=1.5) == ()
    assert min(after - before for before, after in pairwise(looks)) < 0.5


async def test_auto_takes_files_in_memory_where_everybody_is_on_one_host_and_removes_them(
    tmp_path: Path, model: str, hub: str
) -> None:
    config = configure(tmp_path / "out", model, hub, ranks=1, transport="auto")
    async with serving_engine(model, hub):
        async with one_rank(config) as client:
            await train(client, 1, ranks=1)
            _, manifest = await activate(hub, 1)
            file = Path(manifest.files[0].path)
            assert file.is_relative_to("/dev/shm")
            assert await asyncio.to_thread(file.exists)
        assert not await asyncio.to_thread(file.parent.parent.exists)


@pytest.mark.parametrize(("transport", "travels"), [("filesystem", "filesystem"), ("nccl", "stream")])
async def test_an_engine_answers_with_an_adapter_as_with_the_merged_weights(
    tmp_path: Path, model: str, hub: str, transport: Transport, travels: str
) -> None:
    config = configure(tmp_path / "out", model, hub, ranks=1, transport=transport)
    lora = LoraConfig(rank=2, alpha=4.0, target_modules=["q_proj", "down_proj"])
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    async with serving_engine(model, hub) as served, one_rank(config) as client:
        folder = await train(client, 2, ranks=1)
        _, manifest = await activate(hub, 2)
        assert (manifest.kind, manifest.transport.value) == (VersionKind.LORA, travels)
        assert manifest.adapter is not None
        assert (manifest.adapter.rank, manifest.adapter.lora_alpha) == (2, 4.0)
        assert manifest.adapter.target_modules == ("down_proj", "q_proj")
        assert "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight" in {t.name for t in manifest.tensors}
        made = await complete(served.engine, ask(PROMPT))
        assert {span.version for span in made.version_spans} == {2}
        models = [load_model(ModelConfig(name=str(name), device="cpu")) for name in (folder, model)]
        merged, base = (torch.from_numpy(full_forward(one, PROMPT, made.token_ids.tolist())) for one in models)
        torch.testing.assert_close(torch.from_numpy(made.logprobs), merged, atol=1e-5, rtol=0)
        assert (merged - base).abs().max() > 1e-3
