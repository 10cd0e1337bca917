"""Failures while saving: all ranks hear of them, in a line, whichever library they come from."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import checkpoint_kit as kit
from meshrl.training.checkpoints import files as checkpoint_files
from meshrl.training.checkpoints.checkpointer import Checkpointer, CheckpointError
from meshrl.training.checkpoints.saving_ranks import SavingRanks
from meshrl.training.config import CheckpointConfig
from meshrl.training.parallel.plan import ParallelPlan
from meshrl.wire.saved_steps import steps_in


class TwoRanks(SavingRanks):
    """This rank beside one that failed, or not."""

    def __init__(self, *, other_fails: bool) -> None:
        super().__init__(ParallelPlan(rank=1, dp_shard=2))
        self.votes: list[bool] = []
        self._other_fails = other_fails

    def any(self, flag: bool) -> bool:
        self.votes.append(flag)
        return flag or self._other_fails


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A disk that is soon full, as far as one file goes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_full_disk_is_told_in_a_line_and_the_next_save_works(tmp_path: Path, weights_only: bool) -> None:
    trained = kit.build(kit.save_model(tmp_path / "model"))
    kit.train(trained, 1)
    checkpointer = Checkpointer(*trained, tmp_path, tokenizer=None)
    with files_of_at_most(20_000), pytest.raises(CheckpointError, match=r"File too large.*a disk with room") as raised:
        checkpointer.save(weights_only=weights_only)
    assert "\n" not in str(raised.value)
    assert [path for path in tmp_path.rglob("step_*") if any(path.iterdir())] == []
    assert (checkpointer.save(weights_only=weights_only)).is_dir()


def test_what_another_rank_cannot_do_fails_here_too() -> None:
    group = TwoRanks(other_fails=True)
    with pytest.raises(CheckpointError, match="another rank could not write, its log says why"):
        group.together("write", lambda: None)
    assert group.votes == [False]


def test_what_this_rank_cannot_do_is_told_to_the_others() -> None:
    group = TwoRanks(other_fails=False)

    def write() -> None:
        raise PermissionError("read-only")

    with pytest.raises(CheckpointError, match=r"rank 1 could not write \(read-only\)"):
        group.together("write", write)
    assert group.votes == [True]
    assert group.together("count", lambda: 3) == 3


def test_old_checkpoints_that_cannot_go_do_not_fail_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = kit.build(kit.save_model(tmp_path / "model"))
    checkpointer = Checkpointer(*trained, tmp_path, tokenizer=None)

    def busy(folder: Path) -> None:
        raise OSError(f"{folder}: device busy")

    monkeypatch.setattr(checkpoint_files, "remove", busy)
    heard: list[int] = []
    for trained.run.step_done in (1, 2):
        checkpointer.save_as(CheckpointConfig(keep_last=1), lambda step, folder: heard.append(step))
    assert heard == steps_in(tmp_path / "checkpoints") == [1, 2]
