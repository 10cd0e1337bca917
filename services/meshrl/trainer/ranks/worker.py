"""A rank of the trainer but the first: does what rank 0 orders, collective by collective, until it says Stop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from loguru import logger

from meshrl.trainer.publishing.snapshots import Exit, open_exit
from meshrl.trainer.ranks.commands import Gather, Open, Save, Train, follow
from meshrl.training.checkpoints.checkpointer import Checkpointer, CheckpointError
from meshrl.training.config import CheckpointConfig
from meshrl.training.learner import Learner, StepError


class Follower:
    """Carries out the orders of one run. Whatever rank 0 survives (a bad batch, a full disk) it survives as well."""

    def __init__(
        self,
        learner: Learner,
        checkpointer: Checkpointer,
        *,
        publish_dtype: torch.dtype,
        ckpt: CheckpointConfig | None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`release` gives memory that no tensor needs back to the device, after each step."""
        self._learner = learner
        self._checkpointer = checkpointer
        self._publish_dtype = publish_dtype
        self._ckpt = ckpt
        self._release = release
        self._exit: Exit | None = None

    def run(self) -> None:
        """Follows to the end."""
        follow(self._learner.parallel, self._carry_out)
        self._checkpointer.settle()

    def _carry_out(self, order: Open | Train | Gather | Save) -> None:
        if isinstance(order, Train):
            try:
                self._learner.step(order.batch.micro_batches)
            except StepError as error:  # all ranks raised it, and rank 0 reports it
                logger.error("{}", error)
        elif isinstance(order, Gather):
            assert self._exit is not None, "rank 0 opens the exits before it takes a version"
            self._exit.take(self._learner.step_done)
            self._release()
        elif isinstance(order, Open):
            self._exit = open_exit(order.settings, self._learner.model, self._publish_dtype, self._learner.parallel)
        else:
            self._save(order)

    def _save(self, order: Save) -> None:
        try:
            if order.in_background:
                self._checkpointer.save_async(weights_only=order.weights_only)
            else:
                self._checkpointer.save(weights_only=order.weights_only)
        except CheckpointError as error:  # all ranks raised it, and rank 0 reports it
            logger.error("no checkpoint of step {}: {}", self._learner.step_done, error)
