"""Checkpoints of a learner: DCP shards to resume from and a Hugging Face snapshot to serve; both trainers use it.

    <output_dir>/checkpoints/step_N/trainer/   model, optimizer and progress, in torch's distributed checkpoint format
    <output_dir>/weights/step_N/               Hugging Face folder

The schedule is a function of the step, so the step is all of it that needs saving. Each folder is written beside its
place and renamed into it, so a folder with its final name is whole.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import PreTrainedTokenizerBase

from meshrl.training.config import CheckpointConfig
from meshrl.training.learner import Learner


class CheckpointError(Exception):
    """A checkpoint could not be found or read; the message says what to change."""


class Checkpointer:
    """Writes, prunes and restores the checkpoints of one learner. Not thread-safe: call it between steps."""

    def __init__(
        self, learner: Learner, output_dir: Path, *, tokenizer: PreTrainedTokenizerBase | None, part: str = "trainer"
    ) -> None:
        self._learner = learner
        self._checkpoints = output_dir / "checkpoints"
        self._weights = output_dir / "weights"
        self._tokenizer = tokenizer
        self._part = part
        self._own: set[Path] = set()  # folders of this run; what an earlier run left at the same step is replaced

    def save(self, *, weights_only: bool = False) -> Path:
        """Writes the state after the last step and returns its folder. The same step again is a no-op.

        A folder that another run left there is replaced.
        """
        step = self._learner.step_done
        weights = self._weights / f"step_{step}"
        if not self._holds(weights):
            with _renamed_when_whole(weights) as partial:
                self._learner.model.save_pretrained(partial)
                if self._tokenizer is not None:
                    self._tokenizer.save_pretrained(partial)
            self._own.add(weights)
        if weights_only:
            return weights
        shards = self._checkpoints / f"step_{step}" / self._part
        if not self._holds(shards):
            with _renamed_when_whole(shards) as partial, _single_process():
                state_dict_saver.save(self._state(), checkpoint_id=partial, no_dist=True)
            self._own.add(shards)
        return shards

    def prune(self, config: CheckpointConfig) -> None:
        """Deletes checkpoints and snapshots beyond `keep_last`, sparing multiples of `keep_interval`."""
        if config.keep_last is None:
            return
        steps = sorted({*_saved_steps(self._checkpoints), *_saved_steps(self._weights)})
        for step in steps[: -config.keep_last]:
            if config.keep_interval is None or step % config.keep_interval:
                shutil.rmtree(self._weights / f"step_{step}", ignore_errors=True)
                shutil.rmtree(self._folder(step), ignore_errors=True)
                with suppress(OSError):  # another process keeps its part of the step here, or there was none
                    self._folder(step).parent.rmdir()

    def restore(self, step: int) -> int:
        """Loads model, optimizer and step number; -1 takes the newest checkpoint. Returns the step.

        Raises CheckpointError when there is none to resume from.
        """
        resumable = sorted(saved for saved in _saved_steps(self._checkpoints) if self._folder(saved).is_dir())
        if step == -1 and resumable:
            step = resumable[-1]
        if step not in resumable:
            wanted = "the newest step" if step == -1 else f"step {step}"
            raise CheckpointError(
                f"cannot resume from {wanted}: {self._checkpoints} holds steps {resumable or 'none'}; "
                "set ckpt.resume_step to one of them, or leave it out to start afresh"
            )
        state = self._state()
        with _single_process():
            state_dict_loader.load(state, checkpoint_id=self._folder(step), no_dist=True)
            set_state_dict(
                self._learner.model,
                self._learner.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        self._learner.step_done = int(state["progress"]["step"])
        self._own |= {self._folder(step), self._weights / f"step_{step}"}
        return self._learner.step_done

    def _holds(self, folder: Path) -> bool:
        return folder in self._own and folder.is_dir()

    def _folder(self, step: int) -> Path:
        return self._checkpoints / f"step_{step}" / self._part

    def _state(self) -> dict[str, Any]:
        with _single_process():
            model, optimizer = get_state_dict(self._learner.model, self._learner.optimizer)
        progress = {"step": torch.tensor(self._learner.step_done)}
        return {"model": model, "optimizer": optimizer, "progress": progress}


def _saved_steps(root: Path) -> Iterator[int]:
    folders: Iterable[Path] = root.glob("step_*") if root.is_dir() else ()
    for folder in folders:
        number = folder.name.removeprefix("step_")
        if number.isdigit():
            yield int(number)


@contextmanager
def _renamed_when_whole(folder: Path) -> Iterator[Path]:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _single_process() -> Iterator[None]:
    """Keeps torch from warning that there is no process group, which is what one process wants."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed.*")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
        yield
