"""The layout of a model's weights, by which versions are compared with an engine's model; and torch's element types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.tensors import DTYPES

_OTHER_NAMES = {"float8_e4m3": "float8_e4m3fn"}

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, _OTHER_NAMES.get(name, name)) for name in DTYPES}
"""torch's type by the contract's name."""
SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {DTYPES[name].safetensors: TORCH_DTYPES[name] for name in DTYPES}
"""torch's type by the name in the header of a safetensors file."""
_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
MAX_NAMED_DIFFERENCES = 3

Spec = tuple[str, str, tuple[int, ...]]
"""(Hugging Face name, the contract's dtype name, shape) of one tensor."""
Layout = tuple[Spec, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """The contract's name of a torch type, or torch's own where the contract has none."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    return tuple((name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items())


def mismatch(version: int, ours: Layout, theirs: Iterable[Spec]) -> MeshError | None:
    """The LAYOUT_MISMATCH that names where a version's tensors and the engine's differ, if they do."""
    wanted = {name: (dtype, shape) for name, dtype, shape in ours}
    came = {name: (dtype, shape) for name, dtype, shape in theirs}
    differences = [f"missing {name}" for name in wanted if name not in came]
    differences += [f"unknown {name}" for name in came if name not in wanted]
    differences += [
        f"{name} is {wanted[name][0]} {wanted[name][1]}, got {came[name][0]} {came[name][1]}"
        for name in wanted
        if name in came and came[name] != wanted[name]
    ]
    if not differences:
        return None
    named, more = "; ".join(differences[:MAX_NAMED_DIFFERENCES]), len(differences) - MAX_NAMED_DIFFERENCES
    text = f"version {version} does not fit the served model: {named}{f'; and {more} more' if more > 0 else ''}"
    return MeshError(Reason.LAYOUT_MISMATCH, text)
