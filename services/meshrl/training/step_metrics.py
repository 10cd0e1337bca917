"""Metrics of a step that the trainer and sft log alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshrl.training.bench.throughput import peak_flops, peak_memory_gib, step_flops, token_flops
from meshrl.training.learner import Learner, StepResult
from meshrl.wire.types import MicroBatch


def common_metrics(result: StepResult) -> dict[str, float]:
    """Of the objective, the optimizer and the routers."""
    return {
        **result.routing,
        "loss/mean": result.loss,
        "optim/grad_norm": result.grad_norm,
        "optim/lr": result.lr,
        "optim/zero_grad_ratio": result.zero_grad_ratio,
    }


class DeviceUse:
    """How well the steps of one run use the devices."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._peak_flops = peak_flops(learner.device)
        self._token_flops: float | None = None  # once the run's adapters are mounted

    def metrics(self, rows: Sequence[MicroBatch], *, tokens: int, seconds: float) -> dict[str, float]:
        """Of a step with the rows of all ranks, which stand for `tokens`."""
        model, ranks = self._learner.model, self._learner.parallel.plan.world_size
        if self._token_flops is None:
            self._token_flops = token_flops(model)
        return {
            "perf/throughput": tokens / seconds,
            "perf/throughput_per_gpu": tokens / seconds / ranks,
            "perf/mfu": step_flops(model, rows, self._token_flops) / seconds / self._peak_flops / ranks,
            "perf/peak_memory": peak_memory_gib(self._learner.device),
        }


def mean(values: NDArray[np.generic]) -> float:
    return float(values.mean(dtype=np.float64)) if values.size else 0.0
