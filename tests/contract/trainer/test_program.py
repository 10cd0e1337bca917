"""The trainer program beside a real hub, both in this process: from start to drain, and again from a checkpoint."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from opentelemetry import trace
from transformers import Qwen3ForCausalLM

import polling
import ranked_trainer
from local_ports import free_port
from meshrl.client import TrainerClient, WeightSyncClient
from meshrl.core.config import ConfigError
from meshrl.core.config.shared import WeightBroadcastConfig
from meshrl.core.program import READY_FILE
from meshrl.trainer.build import build_parts
from meshrl.trainer.config import TrainerConfig
from meshrl.trainer.program import serve
from meshrl.training.config import CheckpointConfig, SchedulerConfig
from meshrl.training.model_config import LoraConfig, TrainerModelConfig
from meshrl.wire.errors import MeshError
from meshrl.wire.types import RunPhase, StepState, Transport
from ranked_trainer import batch
from small_disk import fill, mounted
from state_publisher import StatePublisher
from trainer_kit import UP_S, until, up

END_S = 90.0


def configure(tmp_path: Path, model: str, hub: str, ckpt: CheckpointConfig | None = None) -> TrainerConfig:
    plain = ranked_trainer.configure(tmp_path / "out", model, hub, ranks=1)
    return plain.model_copy(update={"scheduler": SchedulerConfig(type="linear"), "max_steps": 4, "ckpt": ckpt})


@asynccontextmanager
async def trainer(config: TrainerConfig) -> AsyncIterator[tuple[TrainerClient, asyncio.Task[int], asyncio.Event]]:
    stop = asyncio.Event()
    running = asyncio.create_task(serve(config, stop, trace.NoOpTracer()))
    try:
        async with TrainerClient(config.server.address) as client:
            yield client, running, stop
    finally:
        stop.set()
        await asyncio.wait_for(running, END_S)


async def manifest_root(hub: str, version: int) -> bytes:
    async with WeightSyncClient(hub) as client:
        manifest, _ = await client.get_manifest("main", version)
        return manifest.result_root


async def wait_for_version(hub: str, version: int) -> bytes:
    """A trainer answers before its first version is published: what is to happen after that waits for it."""
    async with asyncio.timeout(UP_S):
        while True:
            try:
                return await manifest_root(hub, version)
            except MeshError:  # not there yet
                await asyncio.sleep(0.05)


async def test_a_trainer_that_waits_for_its_hub_says_which_runs_it_takes(tmp_path: Path, model: str) -> None:
    plain = configure(tmp_path, model, f"127.0.0.1:{free_port()}")
    lora = plain.model.model_copy(update={"lora": LoraConfig(rank=8)})
    async with trainer(plain.model_copy(update={"model": lora, "max_concurrent_runs": 2})) as (client, running, _):
        info = await client.get_trainer()
        assert not running.done()
        assert [run.phase for run in info.runs] == [RunPhase.CREATING]
        assert (info.max_runs, info.max_adapter_rank) == (3, 1024)
        assert info.default_adapter is not None
        assert info.default_adapter.rank == 8


async def test_program_publishes_trains_drains_and_resumes(
    tmp_path: Path, model: str, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(READY_FILE, str(tmp_path / "ready"))
    ckpt = CheckpointConfig()
    async with trainer(configure(tmp_path, model, hub, ckpt)) as (client, running, stop):
        first = await wait_for_version(hub, 0)
        await client.submit_batch(batch(1, ranks=1))
        event = await until(client, StepState.DONE, 1)
        assert (tmp_path / "ready").exists()
        second = await manifest_root(hub, 1)
        assert second != first
        assert event.metrics["optim/lr"] == pytest.approx(0.75e-2)
        assert await client.drain() == 1
        assert await asyncio.wait_for(running, END_S) == 0
    saved = Qwen3ForCausalLM.from_pretrained(tmp_path / "out" / "weights" / "step_1")
    original = Qwen3ForCausalLM.from_pretrained(model)
    assert not torch.equal(saved.model.norm.weight, original.model.norm.weight)

    resume = configure(tmp_path, model, hub, CheckpointConfig(resume_step=-1))
    async with trainer(resume) as (client, running, stop):
        await up(client)
        await client.submit_batch(batch(2, ranks=1))
        assert (await until(client, StepState.DONE, 2)).version == 2
        (run,) = (await client.get_trainer()).runs
        assert (run.version, run.epoch) == (2, 2)
        assert await wait_for_version(hub, 2) not in (first, second)
        stop.set()
        assert await asyncio.wait_for(running, END_S) == 0
    assert (tmp_path / "out" / "checkpoints" / "step_2" / "trainer").is_dir()


async def test_stop_before_the_hub_is_up_ends_the_program(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(READY_FILE, str(tmp_path / "ready"))
    async with trainer(configure(tmp_path, model, f"127.0.0.1:{free_port()}")) as (client, running, stop):
        await up(client)
        stop.set()
        assert await asyncio.wait_for(running, END_S) == 0
    assert not (tmp_path / "ready").exists()


def test_what_a_configuration_mends_is_a_config_error(tmp_path: Path, model: str) -> None:
    config = configure(tmp_path, model, "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"cannot load AutoConfig from model\.name"):
        build_parts(config.model_copy(update={"model": TrainerModelConfig(name=str(tmp_path / "nothing"))}), {})
    with pytest.raises(ConfigError, match="cannot resume from step 3"):
        build_parts(config.model_copy(update={"ckpt": CheckpointConfig(resume_step=3)}), {})


# --- disks without room ---------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", mebibytes=32) as folder:
        yield folder


async def test_a_full_disk_ends_the_trainer_with_a_sentence_and_it_resumes(
    tmp_path: Path, model: str, hub: str, disk: Path, errors_said: list[str]
) -> None:
    """The checkpoint's disk is full."""
    config = configure(tmp_path, model, hub, CheckpointConfig(interval=1)).model_copy(update={"output_dir": disk})
    async with trainer(config) as (client, running, _):
        await up(client)
        await client.submit_batch(batch(1, ranks=1))
        await until(client, StepState.DONE, 1)
        await polling.until((disk / "checkpoints" / "step_1" / "trainer").is_dir)
        filler = fill(disk)
        await client.submit_batch(batch(2, ranks=1))
        assert await asyncio.wait_for(running, END_S) == 1
    (said,) = errors_said
    assert "Traceback" not in said
    assert "No space left on device" in said
    assert "free some, and resume with --ckpt.resume-step -1" in said
    filler.unlink()
    config = configure(tmp_path, model, hub, CheckpointConfig(interval=1, resume_step=-1))
    async with trainer(config.model_copy(update={"output_dir": disk})) as (client, running, stop):
        await up(client)
        (run,) = (await client.get_trainer()).runs
        assert run.version == 1
        await client.submit_batch(batch(2, ranks=1))
        await until(client, StepState.DONE, 2)
        stop.set()
        assert await asyncio.wait_for(running, END_S) == 0


async def test_a_full_disk_for_versions_ends_the_trainer_with_a_sentence(
    tmp_path: Path, model: str, hub: str, disk: Path, errors_said: list[str]
) -> None:
    """The disk of weight_broadcast.broadcast_dir is full; nothing is wrong with that of the checkpoints."""
    files = WeightBroadcastConfig(type="filesystem", address=hub, broadcast_dir=str(disk))
    config = configure(tmp_path, model, hub, CheckpointConfig()).model_copy(update={"weight_broadcast": files})
    async with trainer(config) as (client, running, _):
        await wait_for_version(hub, 0)
        fill(disk)
        await client.submit_batch(batch(1, ranks=1))
        assert await asyncio.wait_for(running, END_S) == 1
    (said,) = errors_said
    assert "Traceback" not in said
    assert "No space left on device" in said
    assert "free some space" in said


async def test_a_version_that_the_hub_refuses_ends_the_trainer_with_a_sentence(
    tmp_path: Path, model: str, hub: str, errors_said: list[str]
) -> None:
    async with trainer(configure(tmp_path, model, hub)) as (client, running, _), WeightSyncClient(hub) as other:
        await wait_for_version(hub, 0)
        newer = StatePublisher(other, Transport.STREAM, tmp_path / "unused", run_id="main", epoch=2)
        await newer.publish(0, {"w": torch.ones(4)})
        await client.submit_batch(batch(1, ranks=1))
        assert await asyncio.wait_for(running, END_S) == 1
    said = "\n".join(errors_said)
    assert "Traceback" not in said
    assert "training ended: STALE_EPOCH" in said
