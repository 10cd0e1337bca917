"""A learner with the one run that it trains, as tests of training want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from meshrl.algorithms.objective import BatchCounts, Objective, count
from meshrl.models.adapters import AdapterScale
from meshrl.models.expert_lora import ExpertAdapter
from meshrl.models.lora import LoraLinear, make_set, prepare_lora
from meshrl.training.config import OptimConfig, SchedulerConfig
from meshrl.training.learner import Learner, RunRows, StepResult
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
    ) -> Trained:
        scheduler = scheduler or SchedulerConfig()
        return cls(learner, learner.new_run(objective=objective, optim=optim, scheduler=scheduler, max_steps=max_steps))

    @property
    def model(self) -> PreTrainedModel:
        return self.learner.model

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        return self.learner.step(self.run, micro_batches)

    def pass_rows(self, micro_batches: Sequence[MicroBatch], counts: BatchCounts | None = None) -> None:
        """`counts` by default of these rows."""
        counts = counts or count(micro_batches)
        self.learner.pass_rows([RunRows(run=self.run, micro_batches=micro_batches, counts=counts)])

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> TokenRecord:
        return self.learner.evaluate(self.run, micro_batches)


def apply_lora(
    model: nn.Module, *, rank: int, alpha: float, dropout: float, target_modules: Sequence[str], **more: Sequence[str]
) -> dict[str, LoraLinear | ExpertAdapter]:
    """Mounts a set of adapters on a model; more targets are those of `prepare_lora`, which returns the layers."""
    prepared = prepare_lora(model, target_modules=target_modules, **more)
    experts = more.get("target_parameters", ())
    scale = AdapterScale(rank=rank, alpha=alpha, dropout=dropout)
    make_set(model, scale, target_modules=target_modules, target_parameters=experts).mount()
    return prepared
