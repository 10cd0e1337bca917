"""Where the time of preparing one version goes: for the agent's log line and the `rl.sync.apply` span."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PartTimes:
    """Seconds by part, in the order in which the parts began; a part that is met again goes on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def begin(self) -> None:
        """Forgets the version before."""
        self.seconds = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what is done inside to `name`, also where it fails."""
        seconds, began_s = self.seconds, time.monotonic()
        try:
            yield
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.monotonic() - began_s

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.seconds.items())
