"""Checkpoints that the training loop writes at intervals, at the end and when asked, and how it goes on from one."""

import asyncio
from pathlib import Path

import pytest
import torch

from meshrl.models.state import gather_state
from meshrl.trainer.runs.steps import StepBook
from meshrl.training.checkpoints.checkpointer import Checkpointer, CheckpointError
from meshrl.training.config import CheckpointConfig
from meshrl.training.learner import UpdateError
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import StepState
from training_loop import Running, batch, build, running


async def test_checkpoints_at_interval_and_at_the_end_keep_the_last(tmp_path: Path) -> None:
    async with running(tmp_path, CheckpointConfig(interval=1, keep_last=2)) as trainer:
        for step in (1, 2, 3):
            trainer.queue.submit(batch(step), str(step))
            event = await trainer.until(StepState.DONE, step)
            assert event.durable_step in (step - 1, step)  # the version is published while the checkpoint is written
    assert trainer.queue.book.info().durable_step == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_2", "step_3"]
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["step_2", "step_3"]


async def test_checkpoints_in_the_background_are_all_on_disk_at_the_end(tmp_path: Path) -> None:
    async with running(tmp_path, CheckpointConfig(interval=1, keep_last=2, save_async=True)) as trainer:
        for step in (1, 2, 3):
            trainer.queue.submit(batch(step), str(step))
            assert (await trainer.until(StepState.DONE, step)).durable_step < step
        trainer.queue.close()
        await trainer.ended()
        assert trainer.error is None
        await asyncio.sleep(0)  # the last news of the training thread
    assert trainer.queue.book.info().durable_step == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_2", "step_3"]


async def test_a_checkpoint_that_fails_in_the_background_ends_the_trainer_and_is_never_durable(tmp_path: Path) -> None:
    async with running(tmp_path, CheckpointConfig(interval=1, save_async=True)) as trainer:
        (tmp_path / "checkpoints").write_text("a file where a folder should be")
        trainer.queue.submit(batch(1), "1")
        await trainer.until(StepState.DONE, 1)
        trainer.queue.submit(batch(2), "2")
        await trainer.ended()
    assert isinstance(trainer.error, CheckpointError)
    assert "could not start a checkpoint" in str(trainer.error)
    assert trainer.queue.book.info().durable_step == 0


async def test_a_checkpoint_that_was_asked_for_and_fails_is_the_callers_news(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        (tmp_path / "checkpoints").write_text("a file where a folder should be")
        with pytest.raises(MeshError, match="could not start a checkpoint") as raised:
            await trainer.queue.save_checkpoint(weights_only=False)
        assert raised.value.reason is Reason.CHECKPOINT_FAILED
        trainer.queue.submit(batch(1), "1")
        await trainer.until(StepState.DONE, 1)


async def give_up(trainer: Running) -> None:
    """Asks for a checkpoint, and goes away before there is one."""
    asking = asyncio.create_task(trainer.queue.save_checkpoint(weights_only=True))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled()


async def test_a_caller_that_gives_up_on_its_checkpoint_harms_nobody(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        await give_up(trainer)
        trainer.queue.submit(batch(1), "1")
        await trainer.until(StepState.DONE, 1)
        assert (tmp_path / "weights" / "step_0").is_dir()
        await give_up(trainer)
        trainer.queue.close()
        await trainer.ended()
        assert trainer.error is None


@pytest.mark.parametrize("ckpt", [CheckpointConfig(keep_last=2), None])
async def test_checkpoints_that_are_asked_for_are_pruned_as_configured(
    tmp_path: Path, ckpt: CheckpointConfig | None
) -> None:
    async with running(tmp_path, ckpt) as trainer:
        for step in (1, 2, 3):
            trainer.queue.submit(batch(step), str(step))
            await trainer.until(StepState.DONE, step)
            saved, path = await trainer.queue.save_checkpoint(weights_only=False)
            assert saved == step
            assert (path / "checkpoint.json").is_file()
        await trainer.queue.save_checkpoint(weights_only=True)
        kept = ["step_2", "step_3"] if ckpt else ["step_1", "step_2", "step_3"]
        for root in ("checkpoints", "weights"):
            assert sorted(path.name for path in (tmp_path / root).iterdir()) == kept


async def test_weights_that_are_half_updated_end_the_trainer_and_are_never_used(tmp_path: Path) -> None:
    trained = build(type="muon")

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    async with running(tmp_path, CheckpointConfig(interval=1), trained=trained) as trainer:
        trainer.queue.submit(batch(1), "1")
        await trainer.until(StepState.DONE, 1)
        whole = gather_state(trained.model)
        trained.run.optimizer.parts[1].register_step_pre_hook(no_memory)
        trainer.queue.submit(batch(2), "2")
        failed = await trainer.until(StepState.FAILED, 2)
        await trainer.ended()
    assert isinstance(trainer.error, UpdateError)
    assert "the trainer stopped: step 2: the optimizer failed in the midst of its step" in failed.message
    assert any(not torch.equal(tensor, whole[name]) for name, tensor in gather_state(trained.model).items())
    assert sorted(trainer.hub.versions) == [1]
    resumed = build(type="muon")
    assert Checkpointer(*resumed, tmp_path, tokenizer=None).restore(-1) == 1
    assert all(torch.equal(tensor, whole[name]) for name, tensor in gather_state(resumed.model).items())


async def test_a_trainer_goes_on_from_a_checkpoint_to_the_bit_with_its_totals(tmp_path: Path) -> None:
    async with running(tmp_path, CheckpointConfig()) as trainer:
        trainer.queue.submit(batch(1), "a")
        first = (await trainer.until(StepState.DONE, 1)).metrics
        assert not (tmp_path / "checkpoints").exists()  # one is written at the end alone, unless it is asked for
        step, path = await trainer.queue.save_checkpoint(weights_only=False)
        assert (step, path) == (1, tmp_path / "checkpoints" / "step_1" / "trainer")
        trainer.queue.submit(batch(2), "b")
        await trainer.until(StepState.DONE, 2)
        expected = trainer.hub.versions[2]
    assert (tmp_path / "checkpoints" / "step_2" / "trainer").is_dir()
    async with running(tmp_path) as trainer:
        assert trainer.checkpointer.restore(1) == 1
        trainer.queue.book = StepBook(run_id="main", epoch=2, start_step=1)
        trainer.queue.submit(batch(2), "b")
        done = await trainer.until(StepState.DONE, 2)
        assert done.version == 2
        assert all(torch.equal(tensor, expected[name]) for name, tensor in trainer.hub.versions[2].items())
    assert (first["progress/total_tokens"], done.metrics["progress/total_tokens"]) == (12, 24)
    assert (first["progress/total_samples"], done.metrics["progress/total_samples"]) == (2, 4)
