"""Builds the objective of the `loss` section, which the learner minimises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from meshrl.algorithms.losses import (
    Loss,
    LossOutput,
    aipo_loss,
    cispo_loss,
    dppo_kl_loss,
    grpo_loss,
    gspo_loss,
    load_custom_loss,
)
from meshrl.algorithms.objective import Normaliser, Objective
from meshrl.trainer.loss_config import LossConfig

_LOSSES: Mapping[str, Callable[..., LossOutput]] = {
    "default": dppo_kl_loss,
    "aipo": aipo_loss,
    "grpo": grpo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
}
_ARGUMENTS = {"dppo_mask_low": "mask_low", "dppo_mask_high": "mask_high"}
"""Keys whose argument has another name."""


def build_objective(config: LossConfig) -> Objective:
    """Raises ValueError, which names the key, for a custom loss that cannot be called."""
    loss: Loss
    if config.import_path is not None:
        loss = load_custom_loss(config.import_path, config.kwargs, key="loss")
    else:
        constants = {_ARGUMENTS.get(name, name): value for name, value in config.constants.items()}
        loss = partial(_LOSSES[config.type], **constants)
    return Objective(
        loss=loss,
        normaliser=Normaliser(config.resolved_normaliser),
        fixed_length=config.fixed_length,
        ref_kl_tau=config.ref_kl_tau,
        ref_kl_delta=config.ref_kl_delta,
    )
