"""Element types of the contract as torch names them; used wherever weights are laid out in memory.

The table itself is `wire.tensors.DTYPES`, which clients without torch read too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from meshrl.wire.tensors import DTYPES

_OTHER_NAMES = {"float8_e4m3": "float8_e4m3fn"}

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, _OTHER_NAMES.get(name, name)) for name in DTYPES}
"""torch's type by the contract's name."""
SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {DTYPES[name].safetensors: TORCH_DTYPES[name] for name in DTYPES}
"""torch's type by the name in the header of a safetensors file."""
_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The contract's name of a torch type, such as "bfloat16"; torch's own where the contract has none."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")
