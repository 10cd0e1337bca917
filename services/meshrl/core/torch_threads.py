"""How torch's threads wait on a CPU that several programs share; called by their mains before torch is loaded."""

from __future__ import annotations

from collections.abc import MutableMapping

SPINS = "1000"
"""Some microseconds: as fast as any number where nobody else wants the cores, and beside a program that wants one of
two a training step takes half the processor seconds of OpenMP's 300,000 (tests/benchmarks/RESULTS.md)."""


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Lets threads spin for microseconds until the next kernel, then sleep, unless `environment` says how they wait.

    GNU's OpenMP has them spin for milliseconds, which is for a machine with one program: beside another that wants the
    same cores they take its time, and a kernel waits for a thread of its own that has none. It reads this while torch
    loads.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
