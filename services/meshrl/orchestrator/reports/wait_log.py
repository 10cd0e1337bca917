"""Says in the log what a run waits for, by name, once a minute at most; told by whoever waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loguru import logger

from meshrl.core.clock import Clock

EVERY_S = 60.0
"""Between two lines, and how long a wait lasts before it is worth one."""


class WaitLog:
    """The waits of one run that last now."""

    def __init__(self, clock: Clock, *, every_s: float = EVERY_S) -> None:
        self._clock = clock
        self._every_s = every_s
        self._waits: dict[object, tuple[Callable[[], str], float]] = {}

    @contextmanager
    def waiting(self, describe: Callable[[], str]) -> Iterator[None]:
        """The run waits for what `describe` says, for as long as the block runs; it is asked when a line is due."""
        key = object()
        self._waits[key] = (describe, self._clock.now())
        try:
            yield
        finally:
            del self._waits[key]

    async def say(self) -> None:
        """Logs what is waited for, until it is cancelled."""
        while True:
            now_s = self._clock.now()
            due_s = [since_s + self._every_s - now_s for _, since_s in self._waits.values()]
            if due_s and min(due_s) <= 0.0:
                for describe, since_s in list(self._waits.values()):
                    if now_s - since_s >= self._every_s:
                        logger.info(f"waiting for {now_s - since_s:.0f} s: {describe()}")
                await self._clock.sleep(self._every_s)
            else:
                await self._clock.sleep(min([*due_s, self._every_s / 10.0]))
