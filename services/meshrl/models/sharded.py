"""Parameters that may be sharded over the ranks of a mesh: gathered whole, or filled from a whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Part = tuple[slice, ...] | EllipsisType
"""A slice of each dimension, or all of a tensor."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; the gradient goes to it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, on the mesh's device; collective. Any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: torch.Tensor = tensor.to(tensor.device_mesh.device_type)
    for dim in range(tensor.device_mesh.ndim):  # in one go torch warns that it gathers twice
        assert isinstance(whole, DTensor)
        whole = whole.redistribute(
            placements=[Replicate() if at <= dim else each for at, each in enumerate(tensor.placements)]
        )
    return local(whole)


def own_part(tensor: torch.Tensor) -> Part | None:
    """This rank's part of the whole tensor. None for no element."""
    if not isinstance(tensor, DTensor):
        return ...
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)) if 0 not in sizes else None


def fill_part(tensor: torch.Tensor, part: torch.Tensor) -> None:
    """Copies the part that `own_part` names into a tensor, in its dtype and on its device."""
    own = local(tensor)
    own.copy_(part.to(own.device))  # first, since the device converts faster


def by_parts(tensor: torch.Tensor, make: Callable[..., torch.Tensor], *, device: torch.device) -> torch.Tensor:
    """A tensor shaped and sharded as another: `make` gets this rank's part, on `device`, and its slices.

    Nothing is exchanged; shards that wait on the host are computed on `device`, the mesh's.
    """
    if not isinstance(tensor, DTensor):
        return make(tensor, *(slice(None) for _ in tensor.shape))
    part = own_part(tensor)
    slices = tuple(slice(0, 0) for _ in tensor.shape) if not isinstance(part, tuple) else part
    made = make(tensor.to_local().to(device), *slices)
    return DTensor.from_local(
        made, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )
