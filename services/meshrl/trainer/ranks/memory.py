"""What a rank of the trainer does with GPU memory that it keeps but does not need; called between two steps."""

from __future__ import annotations

from collections.abc import Callable

import torch


def releaser(device: torch.device, *, wanted: bool) -> Callable[[], None]:
    """Returns what gives cached memory back to `device`; nothing happens on a CPU, or where it is not wanted."""
    return torch.cuda.empty_cache if wanted and device.type == "cuda" else lambda: None
