"""Moves a row's arrays to the device without waiting for what the device still computes."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device, copied beside the host's work where that is a GPU."""
    # Arrays decoded from a message are read-only views, which torch must not alias.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
