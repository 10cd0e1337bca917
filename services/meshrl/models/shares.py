"""Ranks that share the rows of a model or its matrix products: the exchanges of its attention and layers.

Context parallelism: each rank has a part of a row's tokens, but in attention all tokens of some heads (Ulysses, arXiv
2309.14509), so that windows, sinks, samples and shared prefixes need nothing of their own. The loss sees the whole
row's logprobs on each of these ranks alike.

Tensor parallelism: ranks have the same rows. A layer divided by columns (outputs) gives each rank some features, and
one divided by rows (inputs) takes them up: the ranks' products are summed, as is the gradient of the first layer's
input. All else is computed by every rank alike.

An exchange and a sum are operators, opaque to torch.compile, so that compiled code keeps the collectives' order.

Shapes: C ranks that share a row of T tokens, t = T / C tokens of a rank, H heads of all ranks, h of one, D head size, F
features that one rank sends another for a token, N predicted tokens of the row, M of a rank, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import distributed_c10d

from meshrl.models.sharded import local

TOKENS_STEP = 8  # a rank's tokens are a multiple of it: torch.compile makes another graph for one, and products like it


@dataclass(frozen=True, kw_only=True)
class _Share:
    group: str  # the name under which torch knows their process group
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self:
        return cls(group=group.group_name, size=dist.get_world_size(group), rank=dist.get_rank(group))

    def own(self, count: int) -> slice:
        """This rank's part of `count` tokens, heads or features."""
        part = count // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


class ContextShare(_Share):
    """This rank among those that share its rows, in the order of their tokens."""

    def missing(self, tokens: int) -> int:
        """Tokens of padding that make the ranks' parts of a row equal."""
        return -tokens % (self.size * TOKENS_STEP)

    def real(self, tokens: int) -> int:
        """How many tokens of this rank's part of a padded row are of the row's own `tokens`, which come first."""
        part = (tokens + self.missing(tokens)) // self.size
        return min(max(tokens - self.rank * part, 0), part)

    def to_heads(self, *tensors_tHD: torch.Tensor) -> list[torch.Tensor]:
        """This rank's tokens of all heads for all tokens of its heads, each (T, h, D).

        Key-value heads fewer than the ranks are repeated; else they are a multiple of them.
        """
        parts_tCF = []
        for tensor in tensors_tHD:
            heads = tensor.shape[1]
            whole = tensor.repeat_interleave(self.size // heads, dim=1) if heads < self.size else tensor
            parts_tCF.append(whole.reshape(len(tensor), self.size, -1))
        received_CtF = _exchange(torch.cat(parts_tCF, dim=-1).transpose(0, 1).contiguous(), self.group)
        flat_TF = received_CtF.flatten(0, 1)
        split = flat_TF.split([part.shape[-1] for part in parts_tCF], dim=-1)
        return [
            own.unflatten(1, (-1, tensor.shape[-1])).contiguous()
            for own, tensor in zip(split, tensors_tHD, strict=True)
        ]

    def to_tokens(self, tensor_ThD: torch.Tensor) -> torch.Tensor:
        """All tokens of this rank's heads for its tokens of all heads, (t, H, D)."""
        parts_CtF = tensor_ThD.reshape(self.size, len(tensor_ThD) // self.size, -1)
        received_tCF: torch.Tensor = _exchange(parts_CtF, self.group).transpose(0, 1)
        return received_tCF.reshape(received_tCF.shape[0], -1, tensor_ThD.shape[-1])

    def whole(self, own_M: torch.Tensor, place_M: torch.Tensor, count: int) -> torch.Tensor:
        """The ranks' values, each at its places, on every rank; (M, ...) become (count, ...).

        A rank's gradient is that of its places: every rank makes the same loss of the whole.
        """
        whole_N: torch.Tensor = _Whole.apply(own_M, place_M, count, self.group)  # type: ignore[no-untyped-call]  # torch's
        return whole_N


class TensorShare(_Share):
    """This rank among those that share its products."""

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, for a use that differs by rank: gradients are summed."""
        copy: torch.Tensor = _Copied.apply(tensor, self.group)  # type: ignore[no-untyped-call]  # torch's
        return copy

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, for a use that is the same on all."""
        total: torch.Tensor = _Summed.apply(tensor, self.group)  # type: ignore[no-untyped-call]  # torch's
        return total

    def alike(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, which all use alike, with the gradient of one rank."""
        same: torch.Tensor = _Alike.apply(tensor, self.size)  # type: ignore[no-untyped-call]  # torch's
        return same

    def stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors in their order, (size, ...), on every rank; without a gradient."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=_process_group(self.group))
        return torch.stack(parts)

    def embedded(self, ids: torch.Tensor, weight: torch.Tensor, padding: int | None) -> torch.Tensor:
        """(..., E) for ids (...); each rank has a part of the table, in order."""
        rows = local(weight)
        place = ids - self.rank * len(rows)
        inside = (place >= 0) & (place < len(rows))
        skipped = None if padding is None else padding - self.rank * len(rows)
        if skipped is not None and not 0 <= skipped < len(rows):
            skipped = None
        found = F.embedding(place.clamp(0, len(rows) - 1), rows, padding_idx=skipped)
        return self.summed(torch.where(inside[..., None], found, 0.0))


def _process_group(name: str) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]  # as torch's operators do


@torch.library.custom_op("meshrl::exchange", mutates_args=())
def _exchange(parts_CtF: torch.Tensor, group: str) -> torch.Tensor:
    """Part r goes to rank r of the group; part r of the result is from rank r."""
    received_CtF = torch.empty_like(parts_CtF, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received_CtF, parts_CtF.contiguous(), group=_process_group(group))
    return received_CtF


@_exchange.register_fake
def _exchange_shape(parts_CtF: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(parts_CtF, memory_format=torch.contiguous_format)


def _keep_group(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _exchange_back(ctx: Any, grad_CtF: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _exchange(grad_CtF, ctx.group), None


_exchange.register_autograd(_exchange_back, setup_context=_keep_group)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_M: torch.Tensor, place_M: torch.Tensor, count: int, group: str) -> torch.Tensor:
        ctx.save_for_backward(place_M)
        whole_N = own_M.new_zeros((count, *own_M.shape[1:]))
        whole_N[place_M] = own_M
        dist.all_reduce(whole_N, group=_process_group(group))
        return whole_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place_M,) = ctx.saved_tensors
        return grad_N[place_M], None, None, None


@torch.library.custom_op("meshrl::sum_over_ranks", mutates_args=())
def sum_over_ranks(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of the ranks' tensors; without a gradient."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_process_group(group))
    return total


@sum_over_ranks.register_fake
def _sum_shape(tensor: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_over_ranks(gradient, ctx.group), None


class _Alike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient / ctx.size, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        total: torch.Tensor = sum_over_ranks(tensor, group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
