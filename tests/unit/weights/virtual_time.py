"""An event loop in which nothing is waited out: its clock goes on to the next timer when there is nothing else to do.

For coroutines that wait for each other and for times, and for nothing outside of the loop: no sockets, no threads.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

_T = TypeVar("_T")


class _Clock(selectors.DefaultSelector):  # type: ignore[misc, valid-type]  # which class that is depends on the system
    """Passes the time that a loop would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left that could wake this loop"
        self.now_s += max(0.0, timeout)
        found: list[tuple[selectors.SelectorKey, int]] = super().select(0.0)
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Clock()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def run_at_once(work: Coroutine[object, object, _T]) -> _T:
    """What `work` returns, whose sleeps and deadlines take no time; their order is kept."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)
