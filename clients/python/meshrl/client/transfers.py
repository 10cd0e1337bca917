"""Ends a call that transfers weight bytes when no bytes moved for a while; such calls have no other deadline.

A large version may take as long as its link needs. Used by the client's CreateVersion and Fetch; `versions.transfer`
and `versions.downloads` resume a transfer over several calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from meshrl.wire.errors import MeshError, Reason

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
