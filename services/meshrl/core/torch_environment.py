"""What torch reads of the environment while it loads, set by the programs' mains: how its threads wait on a CPU that
several programs share, and how a trainer's memory on a GPU grows."""

from __future__ import annotations

from collections.abc import MutableMapping

SPINS = "1000"
"""Some microseconds: as fast as any number where nobody else wants the cores, and beside a program that wants one of
two a training step takes half the processor seconds of OpenMP's 300,000 (2 cores, torch 2.13)."""


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Lets threads spin for microseconds until the next kernel, then sleep, unless `environment` sets how they wait.

    GNU's OpenMP has them spin for milliseconds, which is for a machine with one program: beside another that wants the
    same cores they take its time, and a kernel waits for a thread of its own that has none. It reads this while torch
    loads.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)


def grow_segments(environment: MutableMapping[str, str]) -> None:
    """Lets torch's allocator grow the memory that it has on a GPU, unless `environment` sets how it allocates.

    Rows differ in length, and blocks of one length leave gaps that another cannot use: 4.9 of 84 GiB when a 4B model
    ran out of memory beside an engine on an H200.
    """
    if "PYTORCH_ALLOC_CONF" not in environment:
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
