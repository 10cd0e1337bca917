"""ListCheckpoints: what is on disk and what was asked for, each once, newest first."""

import os
from pathlib import Path

import pytest

from meshrl.trainer.runs.checkpoint_list import CheckpointList
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import CheckpointState


def on_disk(root: Path, step: int) -> Path:
    """What a save leaves and returns."""
    folder = root / f"step_{step}" / "trainer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shard").write_bytes(bytes(10 * step))
    return folder


async def test_a_save_is_listed_from_its_beginning_to_its_end_and_once(tmp_path: Path) -> None:
    on_disk(tmp_path, 2)
    os.utime(tmp_path / "step_2" / "trainer", (1.0, 1.0))  # long before the request
    checkpoints = CheckpointList("main", tmp_path)
    asked = checkpoints.asked("id", name="best", step=3, weights_only=False)
    assert [(one.step, one.state) for one in checkpoints.listed()] == [
        (3, CheckpointState.SAVING),
        (2, CheckpointState.DURABLE),
    ]

    async def save() -> tuple[int, Path]:
        folder = on_disk(tmp_path, 4)  # a step was trained before it began
        listed = checkpoints.listed()  # of a client that lists page by page no entry goes when the save is over
        assert [(one.step, one.request_id) for one in listed] == [(3, "id"), (2, "")]
        return 4, folder

    done = await checkpoints.follow("id", save)
    newest, older = checkpoints.listed()
    assert (newest.step, newest.name, newest.request_id, newest.num_bytes) == (4, "best", "id", 40)
    assert newest.create_time == asked.create_time
    assert (older.step, older.name, older.num_bytes) == (2, "", 20)
    assert checkpoints.asked("id", name="best", step=9, weights_only=False) == done


async def test_each_request_for_a_step_stays_listed(tmp_path: Path) -> None:
    """A client that lists page by page goes on from any of them."""
    checkpoints = CheckpointList("main", tmp_path)

    async def save() -> tuple[int, Path]:
        return 1, on_disk(tmp_path, 1)

    for request_id in ("first", "second"):
        checkpoints.asked(request_id, name=request_id, step=1, weights_only=False)
        await checkpoints.follow(request_id, save)
    assert [(one.request_id, one.num_bytes) for one in checkpoints.listed()] == [("second", 10), ("first", 10)]


async def test_a_save_that_failed_is_listed_with_its_reason_and_may_be_asked_for_again(tmp_path: Path) -> None:
    checkpoints = CheckpointList("main", tmp_path)
    checkpoints.asked("id", name="", step=3, weights_only=False)

    async def save() -> tuple[int, Path]:
        raise MeshError(Reason.CHECKPOINT_FAILED, "the disk is full")

    with pytest.raises(MeshError, match="the disk is full"):
        await checkpoints.follow("id", save)
    (failed,) = checkpoints.listed()
    assert (failed.state, failed.reason, failed.message) == (
        CheckpointState.FAILED,
        "CHECKPOINT_FAILED",
        "the disk is full",
    )
    assert checkpoints.asked("id", name="", step=4, weights_only=False).state is CheckpointState.SAVING


async def test_a_checkpoint_that_was_deleted_is_not_listed(tmp_path: Path) -> None:
    checkpoints = CheckpointList("main", tmp_path)
    checkpoints.asked("id", name="", step=1, weights_only=True)

    async def save() -> tuple[int, Path]:
        return 1, tmp_path / "gone"

    await checkpoints.follow("id", save)
    assert checkpoints.listed() == []
