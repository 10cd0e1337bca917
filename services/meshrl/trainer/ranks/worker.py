"""Any rank of the trainer but rank 0: receives rank 0's commands and carries them out, from the first to the stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(kw_only=True)
class RankRun:
    """A run as a rank other than rank 0 trains it."""

    state: RunState
    checkpointer: Checkpointer
    snapshotter: Snapshotter | None = None  # None until rank 0 sets publishing up


class RankWorker:
    """Carries out the commands of the runs. It survives what rank 0 survives: a bad batch, a full disk."""

    def __init__(
        self,
        learner: Learner,
        runs: Sequence[RankRun],
        *,
        publish_dtype: torch.dtype,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`release` gives memory that no tensor needs back to the device; called after each snapshot."""
        self._learner = learner
        self._runs = {run.state.run_id: run for run in runs}
        self._publish_dtype = publish_dtype
        self._release = release

    def run(self) -> None:
        """Works until rank 0 sends StopCommand, then waits for the saves under way."""
        receive_commands(self._learner.parallel, self._carry_out)
        for run in self._runs.values():
            run.checkpointer.wait_for_save()

    def _carry_out(self, command: WorkCommand) -> None:
        run = self._runs.get(command.run_id)
        if run is None:
            held = ", ".join(map(repr, self._runs))
            text = f"rank 0 sent a command for run {command.run_id!r}, and this rank holds {held}"
            raise MeshError(Reason.UNKNOWN_RUN, f"{text}; start all ranks with one run_id")
        if isinstance(command, TrainCommand):
            try:
                self._learner.step(run.state, command.batch.micro_batches)
            except StepError as error:  # all ranks raised it, and rank 0 reports it
                logger.error("{}", error)
        elif isinstance(command, SnapshotCommand):
            assert run.snapshotter is not None, "rank 0 sets publishing up before it asks for a snapshot"
            self._learner.take_up(run.state)
            run.snapshotter.capture(run.state.step_done)
            self._release()
        elif isinstance(command, PublishSetupCommand):
            run.snapshotter = open_snapshotter(
                command.settings, self._learner.model, self._publish_dtype, self._learner.parallel
            )
        else:
            try:
                if command.in_background:
                    run.checkpointer.save_async(weights_only=command.weights_only)
                else:
                    run.checkpointer.save(weights_only=command.weights_only)
            except CheckpointError as error:  # all ranks raised it, and rank 0 reports it
                logger.error("no checkpoint of step {}: {}", run.state.step_done, error)
