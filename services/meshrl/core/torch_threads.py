"""How torch's threads wait on a CPU that several programs share; called by their mains before torch is loaded."""

from __future__ import annotations

from collections.abc import MutableMapping


def sleep_between_loops(environment: MutableMapping[str, str]) -> None:
    """Lets the threads of a kernel sleep until the next kernel, unless `environment` says how OpenMP's are to wait.

    OpenMP has them spin for milliseconds, which is for a machine with one program: beside another that wants the same
    cores they take its time, and a kernel waits for a thread of its own that has none. It reads this while torch loads.
    """
    if "GOMP_SPINCOUNT" not in environment:
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
