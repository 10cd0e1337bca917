"""The runs as one rank has them, and their making."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from loguru import logger

from meshrl.trainer.objectives import build_objective
from meshrl.trainer.publishing.snapshots import Snapshotter
from meshrl.trainer.ranks.batch_step import BatchStep
from meshrl.trainer.runs.hooks import RunHooks
from meshrl.trainer.runs.settings import RunSettings
from meshrl.training.build import add_set, new_set
from meshrl.training.checkpoints.checkpointer import Checkpointer, CheckpointError
from meshrl.training.checkpoints.random_state import seed_rank
from meshrl.training.learner import Learner
from meshrl.training.memory_estimate import GRADIENT_BYTES, state_bytes
from meshrl.training.run_state import RunState

RUNS = "runs"


@dataclass(kw_only=True)
class RankRun:
    state: RunState
    checkpointer: Checkpointer
    snapshotter: Snapshotter | None = None  # once rank 0 sets publishing up
    step: BatchStep | None = None  # that is being made


class RunMaker:
    """Makes added runs, on every rank alike."""

    def __init__(self, learner: Learner, output_dir: Path, *, base_name: str, hooks: RunHooks | None = None) -> None:
        """`base_name` is the model as the adapters' files name it."""
        self.hooks = hooks or RunHooks()
        self.learner, self.output_dir, self._base_name = learner, output_dir, base_name

    @property
    def runs_folder(self) -> Path:
        return self.output_dir / RUNS

    def folder(self, run_id: str, settings: RunSettings | None) -> Path:
        """A run's own, by default below `runs_folder`."""
        return self.output_dir / settings.folder if settings and settings.folder else self.runs_folder / run_id

    def forget(self, run: RankRun, other: RankRun) -> None:
        """Ends a run on this rank and frees its memory; `other` is taken up in its place."""
        try:
            run.checkpointer.wait_for_save()
        except CheckpointError as error:
            logger.error("the last checkpoint of run {!r} was not written: {}", run.state.run_id, error)
        self.hooks.deleted(run.state.run_id)
        run.state.drop_gradient()
        self.learner.take_up(other.state)

    def bytes_for(self, settings: RunSettings) -> int:
        """Of the adapter with gradient and optimizer, on each rank. Raises ValueError as `make`."""
        assert settings.lora is not None, "runs beside the trainer's own have an adapter"
        adapter_set = new_set(self.learner.model, settings.lora, device=torch.device("meta"))
        return adapter_set.flat.numel() * (torch.float32.itemsize + GRADIENT_BYTES + state_bytes(settings.optim))

    def make(self, run_id: str, settings: RunSettings) -> RankRun:
        """A run at its newest checkpoint, or where its settings start it if it has none. Collective.

        Raises ValueError on every rank, with all other runs unchanged, when its adapter cannot be made, its checkpoint
        cannot be read, memory is short, or a creation hook refuses it.
        """
        assert settings.lora is not None, "runs beside the trainer's own have an adapter"
        learner = self.learner
        learner.put_aside()
        problem: Exception | None = None
        try:
            add_set(learner.model, settings.lora, seed=settings.adapter_seed, device=learner.device)
            seed_rank(settings.seed, 0, learner.parallel.plan)
            state = learner.new_run(
                run_id=run_id,
                objective=build_objective(settings.loss),
                optim=settings.optim,
                scheduler=settings.scheduler,
                max_steps=settings.max_steps,
            )
            learner.take_up(state)
        except (ValueError, RuntimeError) as error:  # torch.OutOfMemoryError is one
            problem = error
        if learner.parallel.any(problem is not None):  # the memory of another rank may be short
            raise ValueError(
                f"run {run_id!r} cannot be made: {problem or 'another rank has no memory left for it'}"
            ) from problem
        checkpointer = Checkpointer(
            learner,
            state,
            self.folder(run_id, settings),
            tokenizer=None,
            seed=settings.seed,
            adapters_of=self._base_name,
            merges=False,
        )
        try:
            if checkpointer.has_checkpoint():
                checkpointer.restore(-1)
            elif (start := settings.start_from) is not None:
                checkpointer.start_from(Path(start.checkpoints), start.step, with_optimizer=start.with_optimizer)
        except CheckpointError as error:
            raise ValueError(f"run {run_id!r} cannot start from a checkpoint: {error}") from error
        refusal: ValueError | None = None
        try:
            self.hooks.created(run_id)
        except ValueError as error:
            refusal = error
        if learner.parallel.any(refusal is not None):
            if refusal is None:
                self.hooks.deleted(run_id)
            raise refusal or ValueError("a creation hook failed on another rank, whose log has the error")
        return RankRun(state=state, checkpointer=checkpointer)
