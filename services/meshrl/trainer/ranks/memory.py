"""Gives GPU memory that torch has cached back to the device, between two steps (`trainer.release_memory`)."""

from __future__ import annotations

from collections.abc import Callable

import torch


def releaser(device: torch.device, *, wanted: bool) -> Callable[[], None]:
    """Returns the function that gives cached memory back; it does nothing on a CPU, or where it is not wanted."""
    return torch.cuda.empty_cache if wanted and device.type == "cuda" else lambda: None
