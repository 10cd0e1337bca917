"""Parameters that may be sharded over the ranks of a mesh: gathered whole, or filled from a whole tensor.

Used where a model is loaded, and by the adapters, the checkpointer and the trainer's publishing.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, on the mesh's device where it is sharded; collective there, else the tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    on_mesh = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(on_mesh, DTensor)
    return on_mesh.full_tensor()


def fill_from_whole(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Copies a whole tensor, which every rank has, into a parameter: all of it, or this rank's shard."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        part = distribute_tensor(whole.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(whole)
