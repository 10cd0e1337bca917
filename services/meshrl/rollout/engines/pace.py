"""Has rollouts do their work on the event loop one after another, with the loop free between two of them.

Without it a thousand rollouts that start, or whose answers come, at the same time are all served in one round of the
loop, and meanwhile no deadline fires, no connection is read and no health check is answered for seconds.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Pace:
    """A queue for the event loop: in each of its rounds one of those that wait goes on."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def turn(self) -> None:
        """Returns when it is the caller's turn; what it does until its next wait has a round of the loop of its own."""
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        self._waiting.append(mine)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next)
        await mine

    def _next(self) -> None:
        while self._waiting:
            next_one = self._waiting.popleft()
            if not next_one.done():  # done: its rollout was cancelled
                next_one.set_result(None)
                break
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._next)
