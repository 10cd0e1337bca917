"""Waits for what has no event: a plain field of another task, a file, what another program reports of itself."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.01


async def until(holds: Callable[[], T | Awaitable[T]], deadline_s: float = 60.0) -> T:
    """What `holds` returns or awaits, once that is true. Raises TimeoutError at the deadline."""
    async with asyncio.timeout(deadline_s):
        while True:
            found = holds()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(POLL_S)
