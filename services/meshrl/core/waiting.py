"""Waiting on an event loop: for a stop or for work, for the next change, until nothing is in flight.

Used by the programs' mains and by every service that waits for more than one thing. Nothing here polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from loguru import logger

T = TypeVar("T")
U = TypeVar("U")

CANCEL_DEADLINE_S = 10.0
"""How long cancelled work has to clean up after itself; what needs longer goes on without anybody waiting for it."""


class StoppedError(Exception):
    """A stop was asked for before the work was done."""


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Returns the result of `work`, or raises StoppedError as soon as `stop` is set; work that is done by then wins.

    Work that is broken off, by a stop or because the caller is cancelled, is cancelled, and its clean-up is waited for
    (CANCEL_DEADLINE_S). Raises what `work` raises.
    """
    working = asyncio.ensure_future(work)
    try:
        await stop_or_first(stop, working)
        if not working.done():
            logger.info("stopping: cancelling what is in flight")
            raise StoppedError
        return working.result()
    finally:
        if not working.done():
            working.cancel()
            await asyncio.wait({working}, timeout=CANCEL_DEADLINE_S)


async def stop_or_first(stop: asyncio.Event, *ends: asyncio.Future[Any]) -> None:
    """Returns once `stop` is set or one of `ends` is done. Cancels none of them, and raises nothing of theirs."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({stopping, *ends}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()


async def first_of(
    left: Coroutine[Any, Any, T], right: Coroutine[Any, Any, U]
) -> tuple[asyncio.Task[T], asyncio.Task[U]]:
    """Runs both until the first of them ends, then cancels the other one and waits for its clean-up.

    Returns their tasks, each of them done or cancelled; the caller looks at results and errors.
    """
    tasks = asyncio.create_task(left), asyncio.create_task(right)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()  # does nothing to one that is done
        await asyncio.wait(tasks)
    return tasks


async def set_within(event: asyncio.Event, deadline_s: float) -> bool:
    """Waits for the event; False when it is not set after `deadline_s`."""
    if event.is_set():
        return True
    try:
        async with asyncio.timeout(deadline_s):
            await event.wait()
    except TimeoutError:  # the caller decides what that means
        return False
    return True


class Pulse:
    """Wakes everybody who waits for a change, each time that there is one.

    A waiter looks at what may have changed, and waits for the next beat if it did not find what it wants. One that
    awaits anything between the two takes `upcoming` before it looks, or it could miss a beat.
    """

    def __init__(self) -> None:
        self._upcoming = asyncio.Event()

    @property
    def upcoming(self) -> asyncio.Event:
        """The event that the next beat sets."""
        return self._upcoming

    def beat(self) -> None:
        """Wakes those who wait now."""
        beaten, self._upcoming = self._upcoming, asyncio.Event()
        beaten.set()

    async def next(self) -> None:
        """Waits for the next beat."""
        await self._upcoming.wait()


class InFlight:
    """Counts what is being done, so that a drain can wait for the last of it."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """How many are being done."""
        return self._count

    @contextmanager
    def one(self) -> Iterator[None]:
        """Counts one more for as long as the block runs."""
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    async def idle(self) -> None:
        """Waits until nothing is being done."""
        await self._idle.wait()

    async def idle_within(self, deadline_s: float) -> bool:
        """Waits until nothing is being done; False when something still is after `deadline_s`."""
        return await set_within(self._idle, deadline_s)
