"""A learner with the one run that it trains, as tests of training want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedModel

from meshrl.algorithms.objective import Objective
from meshrl.training.config import OptimConfig, SchedulerConfig
from meshrl.training.learner import Learner, StepResult
from meshrl.training.run_state import RunState, TokenRecord
from meshrl.wire.types import MicroBatch


class Trained(NamedTuple):
    learner: Learner
    run: RunState

    @classmethod
    def by(
        cls,
        learner: Learner,
        objective: Objective,
        optim: OptimConfig,
        scheduler: SchedulerConfig | None = None,
        *,
        max_steps: int | None = None,
        optim_cpu_offload: bool = False,
    ) -> Trained:
        run = RunState.of(
            learner.model,
            objective=objective,
            optim=optim,
            scheduler=scheduler or SchedulerConfig(),
            max_steps=max_steps,
            optim_cpu_offload=optim_cpu_offload,
        )
        return cls(learner, run)

    @property
    def model(self) -> PreTrainedModel:
        return self.learner.model

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        return self.learner.step(self.run, micro_batches)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> TokenRecord:
        return self.learner.evaluate(self.run, micro_batches)
