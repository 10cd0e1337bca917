"""Parameters that may be sharded over the ranks of a mesh: gathered whole, or filled from a whole tensor.

Used where a model is loaded, and by the adapters, the checkpointer and the trainer's publishing.
"""

from __future__ import annotations

from types import EllipsisType

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Part = tuple[slice, ...] | EllipsisType
"""A part of a tensor: a slice of each dimension, or all of it."""


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, on the mesh's device where it is sharded; collective there, else the tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    on_mesh = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(on_mesh, DTensor)
    return on_mesh.full_tensor()


def own_part(tensor: torch.Tensor) -> Part | None:
    """The part of the whole that this rank has of a tensor: all of it where it is not sharded; None for no element."""
    if not isinstance(tensor, DTensor):
        return ...
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)) if 0 not in sizes else None


def fill_part(tensor: torch.Tensor, part: torch.Tensor) -> None:
    """Copies what `own_part` names of a whole into a tensor, in its dtype and on its device."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.copy_(part.to(local.device))  # first, since the device converts faster


def fill_from_whole(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Copies a whole tensor, which every rank has, into a parameter: all of it, or this rank's shard."""
    part = own_part(parameter)
    if part is not None:
        fill_part(parameter, whole[part])
