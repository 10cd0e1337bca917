"""The optimizer and what is measured on gradients before it steps; the learner's last part of a step.

Parameters may be sharded: a rank holds and updates its own part, and what is measured is the same number on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from meshrl.training.config import OptimConfig

OFFLOAD_PART_NUMEL = 64 * 2**20  # parameters whose state is on the device at once, with optim_cpu_offload


class Optimizer:
    """One or several torch optimizers that step as one; `parts` are what a checkpoint saves.

    With `offload` their state waits in the host's memory between steps, and is on the device a part at a time.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer], *, offload: bool = False) -> None:
        self.parts = tuple(parts)
        self._host = HostCopies() if offload else None

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self) -> None:
        """Frees every gradient."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def step(self, rate: float) -> None:
        """Updates the parameters with this learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            if self._host is None:
                part.step()
                continue
            self._host.restore(_state_tensors(part))
            part.step()
            self._host.take(_state_tensors(part))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Holds all state on the device, where it can be read and written, such as for a checkpoint."""
        if self._host is None:
            yield
            return
        tensors = [tensor for part in self.parts for tensor in _state_tensors(part)]
        self._host.restore(tensors)
        try:
            yield
        finally:
            self._host.take([tensor for part in self.parts for tensor in _state_tensors(part)])


class HostCopies:
    """Moves tensors' contents to pinned host memory and back. A tensor keeps its identity; its storage is emptied."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}  # by the tensor's id; optimizer state lives as long as its optimizer

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Empties the storages; their contents are on the host afterwards."""
        taken = list(tensors)
        for tensor in taken:
            host = self._copies.get(id(tensor))
            if host is None:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies[id(tensor)] = host
            host.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in taken):
            torch.cuda.current_stream().synchronize()
        for tensor in taken:
            tensor.untyped_storage().resize_(0)

    def restore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Fills emptied storages again; a tensor that was never taken is as it was."""
        for tensor in tensors:
            host = self._copies.get(id(tensor))
            if host is not None and tensor.untyped_storage().nbytes() == 0:
                tensor.untyped_storage().resize_(host.nbytes)
                tensor.copy_(host, non_blocking=True)


def build_optimizer(model: PreTrainedModel, config: OptimConfig, *, cpu_offload: bool = False) -> Optimizer:
    """The configured optimizer over the model's trainable parameters.

    adamw (arXiv 1711.05101), sgd: vectors have no weight decay. muon (https://kellerjordan.github.io/posts/muon/): for
    the matrices between embedding and head, its steps scaled to the size of AdamW's (arXiv 2502.16982), so that one
    rate serves both; the rest has AdamW. Muon needs whole matrices: sharded ones are gathered for the step.
    Raises ValueError when nothing is trainable.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter; see trainer.model.lora")
    if config.type == "muon":
        ends = {id(p) for end in (model.get_input_embeddings(), model.get_output_embeddings()) for p in _of(end)}
        hidden = [p for p in trainable if p.ndim == 2 and id(p) not in ends]
        chosen = {id(p) for p in hidden}
        rest = [p for p in trainable if id(p) not in chosen]
        parts: list[torch.optim.Optimizer] = [_adamw(part, config) for part in _divided(rest, cpu_offload)]
        parts += [
            torch.optim.Muon(
                part,
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
            for part in _divided(hidden, cpu_offload)
        ]
    else:
        make = _adamw if config.type == "adamw" else _sgd
        parts = [make(part, config) for part in _divided(trainable, cpu_offload)]
    return Optimizer(parts, offload=cpu_offload)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scales gradients down to a global 2-norm of `max_norm` and returns the norm before; the same on every rank.

    It is not finite when a gradient is not; then gradients are left as they are and the caller must not step.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = [_local(gradient) for gradient in gradients if _local(gradient).numel()]
    square = torch.zeros((), dtype=torch.float64, device=own[0].device if own else None)
    if own:
        square = torch.stack(torch._foreach_norm(own)).double().square().sum()
    for group in _shard_groups(gradients):
        square = _summed(square, group)
    value = float(square.sqrt())
    if max_norm is not None and value > max_norm and value != float("inf"):
        torch._foreach_mul_(own, max_norm / (value + 1e-6))
    return value


@torch.no_grad()
def gradient_zeros(parameters: Iterable[nn.Parameter]) -> NDArray[np.int64]:
    """Trainable scalars of this rank whose gradient is exactly zero or absent, and all of them; (2,).

    Their sums over ranks divided: a high ratio means a dead path or a wrong mask.
    """
    numel, nonzero = 0, []
    for parameter in parameters:
        numel += _local(parameter).numel()
        if parameter.grad is not None:
            nonzero.append(torch.count_nonzero(_local(parameter.grad)))
    found = int(torch.stack(nonzero).sum()) if nonzero else 0
    return np.array([numel - found, numel], dtype=np.int64)


def _adamw(parameters: Sequence[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        _groups(parameters, config), lr=config.lr, betas=(config.betas1, config.betas2), eps=config.eps, fused=True
    )


def _sgd(parameters: Sequence[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(_groups(parameters, config), lr=config.lr, momentum=config.momentum, foreach=True)


def _groups(parameters: Sequence[nn.Parameter], config: OptimConfig) -> list[dict[str, object]]:
    groups: list[dict[str, object]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _divided(parameters: Sequence[nn.Parameter], divide: bool) -> Iterator[Sequence[nn.Parameter]]:
    """The parameters in parts of about OFFLOAD_PART_NUMEL of this rank's scalars, or as they are."""
    part: list[nn.Parameter] = []
    numel = 0
    for parameter in parameters:
        if divide and part and numel + _local(parameter).numel() > OFFLOAD_PART_NUMEL:
            yield part
            part, numel = [], 0
        part.append(parameter)
        numel += _local(parameter).numel()
    if part:
        yield part


@torch.no_grad()  # with gradients, to_local would give a new tensor each time
def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's part of every state tensor but the scalars."""
    return [
        _local(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]


def _of(module: nn.Module | None) -> Iterable[nn.Parameter]:
    return () if module is None else module.parameters()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_groups(tensors: Sequence[torch.Tensor]) -> list[dist.ProcessGroup]:
    """The groups over which the tensors are divided; all of a model's are divided alike."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            return [mesh.get_group(dim) for dim, kind in enumerate(tensor.placements) if isinstance(kind, Shard)]
    return []


def _summed(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(value, group=group)
    return value
