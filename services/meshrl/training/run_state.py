"""The trained side of one run: parameters, optimizer, schedule, objective, gradient and progress.

It changes in the learner's calls only, and is what a checkpoint of the run restores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from meshrl.algorithms.objective import Objective
from meshrl.models.adapters import AdapterSet
from meshrl.training.config import OptimConfig, SchedulerConfig
from meshrl.training.lr_schedule import learning_rate
from meshrl.training.optim import Optimizer


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRecord:
    """A pass's values of each of its N rl tokens, for metrics; all (N,), on the CPU."""

    logprobs: NDArray[np.float32]
    inference_logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]
    advantages: NDArray[np.float32]
    masked: NDArray[np.bool_]
    env_index: NDArray[np.int32]

    @classmethod
    def joined(cls, records: Sequence[TokenRecord]) -> TokenRecord:
        names = cls.__dataclass_fields__
        return cls(**{name: np.concatenate([getattr(record, name) for record in records]) for name in names})


@dataclass(frozen=True, kw_only=True, eq=False)
class PassResult:
    """A forward and backward pass. Rank 0 has the tokens of all ranks, another rank its own."""

    tokens: TokenRecord
    loss: float  # the objective, over the rows of all ranks
    metrics: Mapping[str, float]  # the objective's terms and what its loss measured, over the rows of all ranks
    router_counts: NDArray[np.float64]  # of this rank's rows, as RoutingWatch counts them
    seconds: float
    unreplayed: NDArray[np.float64]  # (mismatch_kl, tokens) summed over all ranks, see Learner


@dataclass(kw_only=True, eq=False)
class RunState:
    """The trainable side of one run. The gradient lies in the parameters' `grad`, `passes` made it."""

    run_id: str
    parameters: list[nn.Parameter]
    optimizer: Optimizer
    objective: Objective
    optim: OptimConfig
    scheduler: SchedulerConfig
    max_steps: int | None
    adapters: AdapterSet | None = None  # None: the parameters are the model's own
    random_state: Mapping[str, torch.Tensor] | None = None  # where the run draws on, while another is taken up
    step_done: int = 0
    passes: list[PassResult] = field(default_factory=list)  # since the last step

    @property
    def next_step(self) -> int:
        """The step that is under way, or comes next."""
        return self.step_done + 1

    def learning_rate(self) -> float:
        return learning_rate(self.scheduler, peak=self.optim.lr, step=self.next_step, max_steps=self.max_steps)

    def drop_gradient(self) -> None:
        """Frees the gradient and forgets the passes that made it."""
        self.passes.clear()
        self.optimizer.zero_grad()
        if self.adapters is not None:
            self.adapters.drop_gradient()
