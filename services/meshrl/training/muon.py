"""Muon, the optimizer of hidden matrices, for parameters that may be sharded; made by `build_optimizer`.

    m <- mu m + (1 - mu) g,   u = mu m + (1 - mu) g          Nesterov momentum, each rank on its shard
    O = NewtonSchulz(u)                                      about U V^T of u = U S V^T, a matrix of equal stretch
    W <- (1 - lr * decay) W - lr * 0.2 sqrt(max(M, N)) O     the size of AdamW's steps, so both share a rate and a decay

https://kellerjordan.github.io/posts/muon/, scale and decay of arXiv 2502.16982; the numbers of torch.optim.Muon with
adjust_lr_fn="match_rms_adamw", which has 11 to 16 collectives for a sharded matrix: here an update is gathered once, in
bfloat16, every rank makes the whole O and keeps its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

STEPS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)  # of the post: steep at zero, singular values end within about 0.7 to 1.2
EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """State is `momentum_buffer`, sharded as the parameter is. `step` is collective where it is."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, weight_decay: float, momentum: float) -> None:
        """Raises ValueError for a parameter that is no matrix."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon is for matrices, got a parameter of shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> None:  # type: ignore[override]  # there is no loss
        assert closure is None, "gradients come from the learner"
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(mean, group["momentum"]).bfloat16()
                step = _orthogonal_part(update) if isinstance(update, DTensor) else orthogonal(update)
                scale = 0.2 * math.sqrt(max(parameter.shape))
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-group["lr"] * scale)


def orthogonal(update_MN: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iterations, in the matrix's dtype: X <- a X + (b X X^T + c (X X^T)^2) X."""
    a, b, c = QUINTIC
    wide = update_MN.shape[0] <= update_MN.shape[1]  # the Gram matrix is that of the shorter side
    x = update_MN if wide else update_MN.T
    x = x / x.norm().clamp(min=EPSILON)  # no singular value above 1
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def _orthogonal_part(update: DTensor) -> DTensor:
    mesh, home = update.device_mesh, update.to_local().device
    on_mesh = update.to(mesh.device_type)  # shards that wait on the host are computed where the ranks meet
    assert isinstance(on_mesh, DTensor)
    whole = orthogonal(on_mesh.full_tensor())
    part = distribute_tensor(whole.contiguous(), mesh, update.placements, src_data_rank=None).to(home)
    assert isinstance(part, DTensor)
    return part
