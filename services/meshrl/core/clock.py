"""The time that a part reads and waits by, passed to its constructor; a test passes its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Clock:
    """`now` gives seconds that never go back, `sleep` waits for so many."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
