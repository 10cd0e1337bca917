"""When a transfer of weight bytes is given up, up to the hub or down from it: not while it moves.

A large version may take as long as its link needs, so no deadline is one of the whole transfer: a single attempt ends
when nothing moved for a while, and attempts end when none of them brought it further for a while.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from meshrl.wire.errors import MeshError, Reason

# Worth asking again: the link or the hub was away, or a chunk was damaged on its way.
TRANSIENT = frozenset({Reason.UNREACHABLE, Reason.DRAINING, Reason.DEADLINE_PASSED, Reason.CHUNK_CORRUPT})
WAIT_S = (0.1, 2.0)  # between two attempts, doubled from the first to the second

_T = TypeVar("_T")


@asynccontextmanager
async def while_moving(stall_s: float, what: str) -> AsyncIterator[Callable[[], None]]:
    """Ends what it surrounds when nothing moved for `stall_s`; gives the function to call whenever something does.

    Raises MeshError UNREACHABLE.
    """
    loop = asyncio.get_running_loop()

    def moved() -> None:
        with suppress(RuntimeError):  # it is being given up, or over: another task may hear of that later
            timeout.reschedule(loop.time() + stall_s)

    try:
        async with asyncio.timeout(stall_s) as timeout:
            yield moved
    except TimeoutError as error:
        raise MeshError(Reason.UNREACHABLE, f"nothing of {what} moved for {stall_s:g} s") from error


async def moving(messages: AsyncGenerator[_T, None], stall_s: float, what: str) -> AsyncGenerator[_T, None]:
    """Yields `messages` while they come. Raises MeshError UNREACHABLE when none did for `stall_s`."""
    while True:
        try:
            async with while_moving(stall_s, what):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        yield message


class Attempts:
    """Decides after each attempt at one transfer whether there is another.

    There is, as long as the last one that brought the transfer further ended less than `stall_s` ago.
    """

    def __init__(self, stall_s: float, *, left: int, also: frozenset[Reason] = frozenset()) -> None:
        """`left` is what is to be moved, in any unit; `also`: reasons to try again beside those in TRANSIENT."""
        self._stall_s, self._left, self._worth_it = stall_s, left, TRANSIENT | also
        self._moved_s = asyncio.get_running_loop().time()
        self._wait_s = WAIT_S[0]
        self._trusted = True  # the last attempt of which that is known moved something

    async def another(self, failure: MeshError, *, left: int | None) -> None:
        """Waits a little before the next attempt. Raises `failure` when there is none.

        `left` is what is still to be moved; None while nobody can say, which is taken for the best once.
        """
        now_s = asyncio.get_running_loop().time()
        further = self._trusted if left is None else left < self._left
        if further:
            self._moved_s, self._wait_s = now_s, WAIT_S[0]
        self._trusted = further and left is not None
        self._left = self._left if left is None else left
        if failure.reason not in self._worth_it or now_s + self._wait_s - self._moved_s >= self._stall_s:
            raise failure
        await asyncio.sleep(self._wait_s * random.uniform(0.5, 1.0))
        self._wait_s = min(2 * self._wait_s, WAIT_S[1])
