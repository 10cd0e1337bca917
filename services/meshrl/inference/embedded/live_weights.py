"""The weights that the embedded engine serves; the shadow of a version is swapped in between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from meshrl.models.state import hf_state
from meshrl.versions.layout import Layout, layout_of, mismatch
from meshrl.wire.manifest import digest, root_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Shadow:
    version: int
    tensors: Mapping[str, torch.Tensor]


class LiveWeights:
    """Parameters and persistent buffers of one model, by Hugging Face name."""

    def __init__(self, model: nn.Module) -> None:
        own = dict(model.named_parameters()) | dict(model.named_buffers())
        self._owners = {name: own[name] for name in hf_state(model)}
        self.layout: Layout = layout_of(self._owners)

    def stage(self, version: int, tensors: Mapping[str, torch.Tensor], *, copy: bool = True) -> Shadow:
        """Takes a whole version, copied to the device of the live one unless `copy` is off. Raises MeshError
        LAYOUT_MISMATCH naming the difference."""
        refused = mismatch(version, self.layout, layout_of(tensors))
        if refused is not None:
            raise refused
        shadow = {
            name: tensors[name].detach().to(owner.device, copy=copy).contiguous()
            for name, owner in self._owners.items()
        }
        return Shadow(version=version, tensors=shadow)

    def swap(self, shadow: Shadow) -> None:
        """Makes the shadow live by exchanging storage: no bytes move; tied modules follow their owner."""
        with torch.no_grad():
            for name, tensor in shadow.tensors.items():
                self._owners[name].data = tensor

    def root(self) -> bytes:
        return root_of(
            (name, dtype, shape, digest(tensor_bytes(self._owners[name]))) for name, dtype, shape in self.layout
        )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Little-endian C-order bytes of a tensor, without a copy when it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers; its stubs say so from 3.12 on
