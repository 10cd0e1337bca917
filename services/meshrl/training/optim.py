"""The last part of a learner's step: gradients are clipped and measured, and the optimizer steps.

A rank holds and updates its own part of sharded parameters; every measure is the same on all ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from meshrl.models.experts import expert_layers
from meshrl.models.sharded import local
from meshrl.training.config import OptimConfig
from meshrl.training.muon import Muon

CPU = torch.device("cpu")
COUNTED_AT_ONCE = 2**18  # scalars of a tensor: for smaller ones a call each costs more than a copy
OFFLOAD_PART_NUMEL = 64 * 2**20  # parameters whose state is on the device at once, with optim_cpu_offload


class Optimizer:
    """Torch optimizers that step as one; each parameter belongs to one of the `parts`.

    With `offload` their state lies in the host's memory, pinned beside a GPU; a step has one part's on the device at a
    time.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer], *, offload: bool = False) -> None:
        self.parts = tuple(parts)
        self._offload = offload

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def step(self, rate: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            if not self._offload:
                part.step()
                continue
            waiting = _to_device(part)
            try:
                part.step()
            finally:
                _to_host(part, waiting)
        if self._offload:
            _wait_for_copies()

    def empty_state(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        """Room of the parameter's shape and sharding where its state lies between steps."""
        like = parameter.detach()
        return _on_host(like, dtype) if self._offload else torch.empty_like(like, dtype=dtype)

    @contextmanager
    def state_open(self) -> Iterator[None]:
        """Inside, the parts' state may be read and replaced."""
        yield
        if self._offload:
            for part in self.parts:
                _to_host(part, {})
            _wait_for_copies()


def _on_host(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(like, dtype=dtype, device=CPU, pin_memory=like.is_cuda)


HostState = dict[torch.Tensor, dict[str, torch.Tensor]]  # by parameter and name


@torch.no_grad()
def _to_device(part: torch.optim.Optimizer) -> HostState:
    waiting: HostState = {}
    for parameter, state in part.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                waiting.setdefault(parameter, {})[name] = value
                state[name] = torch.empty_like(value, device=parameter.device).copy_(value, non_blocking=True)
    return waiting


@torch.no_grad()
def _to_host(part: torch.optim.Optimizer, waiting: HostState) -> None:
    for parameter, state in part.state.items():
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or not value.ndim:
                continue
            host = waiting.get(parameter, {}).get(name)
            if host is not None:
                state[name] = host.copy_(value, non_blocking=True)
            elif value.device != CPU:
                state[name] = _on_host(value, value.dtype).copy_(value, non_blocking=True)


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def build_optimizer(model: PreTrainedModel, config: OptimConfig, *, cpu_offload: bool = False) -> Optimizer:
    """The configured optimizer over the model's trainable parameters; vectors have no weight decay.

    adamw: arXiv 1711.05101. muon is for the matrices between embeddings and head, AdamW for the rest. Raises ValueError
    when nothing is trainable.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter; see trainer.model.lora")
    if config.type == "muon":
        head = model.get_output_embeddings()
        ends = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
        ends += [
            experts.module for experts in expert_layers(model, model.config)
        ]  # whose matrices are of three dimensions
        kept = {id(p) for module in ends for p in module.parameters()}  # whose rows or columns are tokens or positions
        hidden = [p for p in trainable if p.ndim == 2 and id(p) not in kept]
        chosen = {id(p) for p in hidden}
        rest = [p for p in trainable if id(p) not in chosen]
        parts = [_adamw(part, config) for part in _divided(rest, cpu_offload)]
        parts += [
            Muon(part, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum)
            for part in _divided(hidden, cpu_offload)
        ]
    else:
        parts = [
            _adamw(part, config)
            if config.type == "adamw"
            else torch.optim.SGD(_groups(part, config), lr=config.lr, momentum=config.momentum, foreach=True)
            for part in _divided(trainable, cpu_offload)
        ]
    return Optimizer(parts, offload=cpu_offload)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scales gradients down to a global 2-norm of `max_norm` and returns the norm before, the same on every rank.

    If that is not finite, gradients are left alone and the caller must not step.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    held = [gradient for gradient in gradients if local(gradient).numel()]
    own = [local(gradient) for gradient in held]
    square = torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    if own:
        squares = torch.stack(torch._foreach_norm(own)).double().square()
        square = (squares / squares.new_tensor([copies(gradient) for gradient in held])).sum()
    if dist.is_initialized():
        dist.all_reduce(square)
    value = float(square.sqrt())
    if own and max_norm is not None and value > max_norm and value != float("inf"):
        torch._foreach_mul_(own, max_norm / (value + 1e-6))
    return value


def copies(tensor: torch.Tensor) -> int:
    """How many ranks of the group have this rank's part of a tensor."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    mesh = tensor.device_mesh
    parts = math.prod(mesh.size(dim) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return dist.get_world_size() // parts


@torch.no_grad()
def gradient_zeros(parameters: Iterable[nn.Parameter]) -> tuple[torch.Tensor, float]:
    """How many of this rank's trainable scalars have a gradient of zero or none, and how many exist; one that n ranks
    have counts as 1 / n. A high share means a dead path or a wrong mask."""
    of_all = 0.0
    gradients: defaultdict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        alike = copies(parameter)
        of_all += local(parameter).numel() / alike
        if parameter.grad is not None:
            gradients[alike, parameter.grad.dtype].append(local(parameter.grad).flatten())
    nonzero = torch.zeros((), dtype=torch.float64)
    for (alike, _), found in gradients.items():
        small = [each for each in found if each.numel() <= COUNTED_AT_ONCE]
        large = [each for each in found if each.numel() > COUNTED_AT_ONCE]
        for each in [torch.cat(small), *large] if small else large:
            nonzero = nonzero.to(each.device) + torch.count_nonzero(each).double() / alike
    return of_all - nonzero, of_all


def _adamw(parameters: Sequence[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        _groups(parameters, config), lr=config.lr, betas=(config.betas1, config.betas2), eps=config.eps, fused=True
    )


def _groups(parameters: Sequence[nn.Parameter], config: OptimConfig) -> list[dict[str, object]]:
    """By mesh, as torch requires."""
    groups: dict[object, dict[str, object]] = {}
    for parameter in parameters:
        is_vector = parameter.ndim < 2
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        fresh: dict[str, object] = {"params": [], "weight_decay": 0.0 if is_vector else config.weight_decay}
        members = groups.setdefault((is_vector, mesh), fresh)["params"]
        assert isinstance(members, list)
        members.append(parameter)
    return list(groups.values())


def _divided(parameters: Sequence[nn.Parameter], divide: bool) -> Iterator[Sequence[nn.Parameter]]:
    part: list[nn.Parameter] = []
    numel = 0
    for parameter in parameters:
        if divide and part and numel + local(parameter).numel() > OFFLOAD_PART_NUMEL:
            yield part
            part, numel = [], 0
        part.append(parameter)
        numel += local(parameter).numel()
    if part:
        yield part
