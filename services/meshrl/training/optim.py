"""The optimizer and what is measured on gradients before it steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from meshrl.training.config import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over the model's trainable parameters, fused; vectors have no weight decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.betas1, config.betas2),
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scales gradients down to a global 2-norm of `max_norm` and returns the norm before.

    It is not finite when a gradient is not; then gradients are left as they are and the caller must not step.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    value = float(norm)
    if max_norm is not None and value > max_norm and value != float("inf"):
        torch._foreach_mul_(gradients, max_norm / (value + 1e-6))
    return value


@torch.no_grad()
def zero_gradient_ratio(parameters: Iterable[nn.Parameter]) -> float:
    """Share of trainable scalars whose gradient is exactly zero or absent; high means a dead path or a wrong mask."""
    zeros = total = 0
    for parameter in parameters:
        total += parameter.numel()
        zeros += parameter.numel() - (0 if parameter.grad is None else int(torch.count_nonzero(parameter.grad)))
    return zeros / max(1, total)
