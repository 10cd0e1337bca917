"""Any rank of the trainer but rank 0: receives rank 0's commands and carries them out, from the first to the stop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from loguru import logger

from meshrl.trainer.publishing.snapshots import Snapshotter, open_snapshotter
from meshrl.trainer.ranks.commands import (
    PublishSetupCommand,
    SnapshotCommand,
    TrainCommand,
    WorkCommand,
    receive_commands,
)
from meshrl.training.checkpoints.checkpointer import Checkpointer, CheckpointError
from meshrl.training.learner import Learner, StepError
from meshrl.training.run_state import RunState
from meshrl.wire.errors import MeshError, Reason


class RankWorker:
    """Carries out the commands of one run. It survives what rank 0 survives: a bad batch, a full disk."""

    def __init__(
        self,
        learner: Learner,
        run: RunState,
        checkpointer: Checkpointer,
        *,
        publish_dtype: torch.dtype,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`release` gives memory that no tensor needs back to the device; called after each snapshot."""
        self._learner, self._run = learner, run
        self._checkpointer = checkpointer
        self._publish_dtype = publish_dtype
        self._release = release
        self._snapshotter: Snapshotter | None = None

    def run(self) -> None:
        """Works until rank 0 sends StopCommand, then waits for the save under way."""
        receive_commands(self._learner.parallel, self._carry_out)
        self._checkpointer.wait_for_save()

    def _carry_out(self, command: WorkCommand) -> None:
        if command.run_id != self._run.run_id:
            text = f"rank 0 sent a command for run {command.run_id!r}, and this rank holds {self._run.run_id!r}"
            raise MeshError(Reason.UNKNOWN_RUN, f"{text}; start all ranks with one run_id")
        if isinstance(command, TrainCommand):
            try:
                self._learner.step(self._run, command.batch.micro_batches)
            except StepError as error:  # all ranks raised it, and rank 0 reports it
                logger.error("{}", error)
        elif isinstance(command, SnapshotCommand):
            assert self._snapshotter is not None, "rank 0 sets publishing up before it asks for a snapshot"
            self._snapshotter.capture(self._run.step_done)
            self._release()
        elif isinstance(command, PublishSetupCommand):
            self._snapshotter = open_snapshotter(
                command.settings, self._learner.model, self._publish_dtype, self._learner.parallel
            )
        else:
            try:
                if command.in_background:
                    self._checkpointer.save_async(weights_only=command.weights_only)
                else:
                    self._checkpointer.save(weights_only=command.weights_only)
            except CheckpointError as error:  # all ranks raised it, and rank 0 reports it
                logger.error("no checkpoint of step {}: {}", self._run.step_done, error)
