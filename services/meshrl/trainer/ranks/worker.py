"""Any rank of the trainer but rank 0: carries out rank 0's commands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from loguru import logger

from meshrl.trainer.publishing.snapshots import open_snapshotter
from meshrl.trainer.ranks.batch_step import BatchStep, pass_slices
from meshrl.trainer.ranks.commands import (
    CreateCommand,
    DeleteCommand,
    PassCommand,
    PublishSetupCommand,
    SaveCommand,
    SnapshotCommand,
    TrainCommand,
    WorkCommand,
    receive_commands,
)
from meshrl.trainer.ranks.rank_runs import RankRun, RunMaker
from meshrl.training.checkpoints.checkpointer import CheckpointError
from meshrl.training.learner import Learner, StepError, UpdateError
from meshrl.wire.errors import MeshError, Reason


class RankWorker:
    """Survives a bad batch and a full disk, as rank 0 does."""

    def __init__(
        self,
        learner: Learner,
        own: RankRun,
        *,
        maker: RunMaker,
        publish_dtype: torch.dtype,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._learner = learner
        self._own = own.state
        self._runs = {own.state.run_id: own}
        self._maker = maker
        self._publish_dtype = publish_dtype
        self._release = release

    def run(self) -> None:
        """Works until StopCommand, and waits for the saves under way."""
        receive_commands(self._learner.parallel, self._carry_out)
        for run in self._runs.values():
            run.checkpointer.wait_for_save()

    def _carry_out(self, command: WorkCommand) -> None:
        if isinstance(command, CreateCommand):
            try:
                self._runs[command.run_id] = self._maker.make(command.run_id, command.settings)
            except ValueError as error:  # all ranks raised it, and rank 0 reports it
                logger.error("{}", error)
            return
        run = self._run(command.run_id)
        match command:
            case DeleteCommand():
                del self._runs[command.run_id]
                self._maker.forget(run, next(iter(self._runs.values())))
            case TrainCommand():
                run.step = BatchStep(run.state, command.micro_batches)
            case PassCommand():
                steps = [self._run(run_id).step for run_id in (command.run_id, *command.beside)]
                assert all(steps), "rank 0 sends a batch before its passes"
                held = [step for step in steps if step is not None]
                for step, made in zip(held, pass_slices(self._learner, held, command.slices), strict=True):
                    if isinstance(made, UpdateError) and step.run is self._own:
                        raise made
                    if isinstance(made, StepError | UpdateError):  # all ranks have it, and rank 0 reports it
                        logger.error("{}", made)
            case SnapshotCommand():
                assert run.snapshotter is not None, "rank 0 sets publishing up before it asks for a snapshot"
                self._learner.take_up(run.state)
                run.snapshotter.capture(run.state.step_done)
                self._release()
            case PublishSetupCommand():
                self._learner.take_up(run.state)
                run.snapshotter = open_snapshotter(command.settings, self._learner, run.state, self._publish_dtype)
            case SaveCommand():
                try:
                    run.checkpointer.save(weights_only=command.weights_only, in_background=command.in_background)
                except CheckpointError as error:  # all ranks raised it, and rank 0 reports it
                    logger.error("no checkpoint of step {}: {}", run.state.step_done, error)

    def _run(self, run_id: str) -> RankRun:
        run = self._runs.get(run_id)
        if run is None:
            held = ", ".join(map(repr, self._runs))
            text = f"rank 0 sent a command for run {run_id!r}, and this rank holds {held}"
            raise MeshError(Reason.UNKNOWN_RUN, f"{text}; start all ranks with one run_id")
        return run
