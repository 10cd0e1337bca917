"""What tests of checkpoints share: a small model, a recorded stream of batches, and the whole state of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from loss_curves import stream_batch
from meshrl.algorithms.losses import dppo_kl_loss
from meshrl.algorithms.objective import Objective
from meshrl.training.build import build_learner
from meshrl.training.checkpoints.train_state import run_tensors
from meshrl.training.config import OptimConfig, SchedulerConfig
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup
from tiny_qwen3 import save_tiny_qwen3
from trained import Trained

VOCAB, MAX_STEPS = 48, 40


def save_model(folder: Path, **changes: Any) -> str:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save_tiny_qwen3(folder, **{"vocab_size": VOCAB, "num_hidden_layers": 2, **shape, **changes})


def model_config(model: str, settings: dict[str, Any]) -> TrainerModelConfig:
    return TrainerModelConfig.model_validate({"name": model, "device": "cpu", **settings})


def build(
    model: str,
    settings: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    parallel: RankGroup | None = None,
) -> Trained:
    torch.manual_seed(3)
    config = model_config(model, settings or {})
    return Trained.by(
        build_learner(config, parallel=parallel or RankGroup(), seed=3),
        objective=Objective(loss=partial(dppo_kl_loss, mask_low=0.2, mask_high=0.2, adv_tau=1.0, kl_tau=1e-3)),
        optim=OptimConfig(**{"lr": 1e-3, **(optim or {})}),
        scheduler=SchedulerConfig(type="cosine", warmup_steps=5),
        max_steps=MAX_STEPS,
    )


def train(trained: Trained, until: int) -> list[dict[str, float]]:
    """Steps up to `until`, each on its batch of the recorded stream; everything a step reports but its times."""
    records = []
    while trained.run.step_done < until:
        step = trained.run.next_step
        result = trained.step(stream_batch(step, dp_size=trained.learner.parallel.plan.dp_size, vocab_size=VOCAB))
        tokens = {name: _digest(getattr(result.tokens, name)) for name in result.tokens.__dataclass_fields__}
        records.append(
            {
                "step": result.step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "zero_grad_ratio": result.zero_grad_ratio,
                "lr": result.lr,
                **result.metrics,
                **tokens,
            }
        )
    return records


def _digest(values: np.ndarray[Any, Any]) -> float:
    return float(np.dot(values.astype(np.float64), np.arange(1, len(values) + 1)))


def state(trained: Trained) -> dict[str, torch.Tensor]:
    """Copies of all that a checkpoint must bring back, whole; collective where the model is sharded."""
    with trained.run.optimizer.state_open():
        tensors = {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for name, tensor in run_tensors(trained.model, trained.run).items()
        }
    return {**tensors, "step": torch.tensor(trained.run.step_done)}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got[name], tensor), name
