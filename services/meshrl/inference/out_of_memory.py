"""Turns a failed allocation into the mesh's own error: the bytes wanted, those free, and the setting to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshrl.inference.sizing import GIB
from meshrl.wire.errors import MeshError, Reason

_WANTED = re.compile(r"tried to allocate ([\d.]+ ?[A-Za-z]+)", re.IGNORECASE)
_ON_THE_HOST = "can't allocate memory"  # torch's allocator of a CPU raises a plain RuntimeError


@contextmanager
def named_out_of_memory(*, doing: str, device: torch.device, remedy: str) -> Iterator[None]:
    """Raises MeshError OUT_OF_MEMORY in place of a failed allocation; `remedy` ends its sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and _ON_THE_HOST not in str(error):
            raise
        wanted = _WANTED.search(str(error))
        asked = f"{wanted[1]} more were asked for" if wanted else "an allocation failed"
        there = ""
        if device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
            there = f" and {free_bytes / GIB:.2f} of {total_bytes / GIB:.1f} GiB are free"
        message = f"{doing} ran out of memory on {device}: {asked}{there}; {remedy}"
        raise MeshError(Reason.OUT_OF_MEMORY, message) from error
