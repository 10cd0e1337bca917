"""Before torch is loaded: whether it may find a GPU, and its variables for threads and GPU memory."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

SPINS = "1000"
"""Microseconds: as fast as any number on idle cores; beside a program on one of two cores a training step takes half
the processor seconds of OpenMP's 300,000 (torch 2.13)."""

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def may_have_gpu(environ: Mapping[str, str]) -> bool:
    return environ.get(VISIBLE_GPUS) not in ("", "-1") and any(driver.exists() for driver in GPU_DRIVERS)


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Lets threads spin for microseconds until the next kernel, then sleep, unless `environment` sets it. In GNU's
    OpenMP they spin for milliseconds, the time of other programs on the same cores."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)


def grow_segments(environment: MutableMapping[str, str]) -> None:
    """Lets torch's allocator grow its GPU memory, unless `environment` sets how it allocates. Blocks for rows of one
    length leave gaps: 4.9 of 84 GiB when a 4B model ran out of memory beside an engine on an H200."""
    if "PYTORCH_ALLOC_CONF" not in environment:
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
