"""How far a trainer with other routers is from the engine that sampled: with the engine's routes, and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.algorithms.objective import Objective
from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.models.logprobs import PackedPolicy
from meshrl.training.config import OptimConfig
from meshrl.training.learner import Learner
from meshrl.wire.types import MicroBatch
from meshrl.wire.types.routes import Routes, joined
from trained import Trained


def sampled(
    prompt: Sequence[int], completion: Sequence[int], logprobs: NDArray[np.float32], routes: Routes | None
) -> TrainSample:
    """A completion as a sample to train on; `routes` are of all tokens but the last, which no engine computes."""
    tokens = np.array([*prompt, *completion], np.int32)
    return TrainSample(
        token_ids=tokens,
        loss_mask=np.arange(len(tokens)) >= len(prompt),
        logprobs=np.concatenate([np.zeros(len(prompt), np.float32), logprobs]),
        routed_experts=joined([(len(tokens) - 1, routes), (1, None)]),
    )


def mismatches(policy: PackedPolicy, samples: Sequence[TrainSample], *, off: float) -> tuple[float, float]:
    """Mean mismatch KL with the samples' routes, and without, once routers are `off` by that share of their weights."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in policy.model.named_parameters():
        if name.endswith("gate.weight"):
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.data += off * parameter.data.std() * noise
    trained = Trained.by(Learner(policy), Objective(loss=cross_entropy_loss), OptimConfig(lr=1e-12))
    rows = pack_samples(samples, seq_len=512).micro_batches

    def mismatch(given: Sequence[MicroBatch]) -> float:
        tokens = trained.evaluate(given)
        log_ratio = tokens.logprobs.astype(np.float64) - tokens.inference_logprobs
        return float((np.exp(log_ratio) - log_ratio - 1.0).mean())

    return mismatch(rows), mismatch([replace(row, routed_experts=None) for row in rows])
