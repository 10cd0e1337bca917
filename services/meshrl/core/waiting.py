"""Waiting on an event loop, without polling."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

from loguru import logger

T = TypeVar("T")
U = TypeVar("U")

CANCEL_DEADLINE_S = 10.0
"""For the clean-up of cancelled work; what needs longer goes on by itself."""


class StoppedError(Exception):
    """A stop was asked for before the work was done."""


async def unless_stopped(stop: asyncio.Event, work: Coroutine[None, None, T] | asyncio.Future[T]) -> T:
    """The result of `work`, or StoppedError as soon as `stop` is set; finished work wins.

    Otherwise it is cancelled, and its clean-up waited for (CANCEL_DEADLINE_S). Raises the errors of `work`.
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
    """Cancels none of `ends`, and raises nothing of theirs."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({stopping, *ends}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()


async def first_of(
    left: Coroutine[None, None, T], right: Coroutine[None, None, U]
) -> tuple[asyncio.Task[T], asyncio.Task[U]]:
    """Runs both until the first ends, cancels the other and waits for its clean-up."""
    tasks = asyncio.create_task(left), asyncio.create_task(right)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()  # does nothing to one that is done
        await asyncio.wait(tasks)
    return tasks


@asynccontextmanager
async def beside(*works: Coroutine[None, None, object]) -> AsyncIterator[None]:
    """Runs `works` while the block runs, then cancels them and waits for their clean-up. Their errors end nothing."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def set_within(event: asyncio.Event, deadline_s: float | None) -> bool:
    """None waits for ever."""
    if event.is_set():
        return True
    try:
        async with asyncio.timeout(deadline_s):
            await event.wait()
    except TimeoutError:  # the caller decides what that means
        return False
    return True


async def next_within(queue: asyncio.Queue[T], wait_s: float) -> T | None:
    try:
        return await asyncio.wait_for(queue.get(), wait_s)
    except TimeoutError:  # something may have come just as the wait ended
        return None if queue.empty() else queue.get_nowait()


async def read_ahead(made: Iterator[T]) -> AsyncGenerator[T, None]:
    """Yields from a blocking iterator without None; the next item is made on a thread while one is used."""
    making = asyncio.create_task(asyncio.to_thread(next, made, None))
    try:
        while (item := await making) is not None:
            making = asyncio.create_task(asyncio.to_thread(next, made, None))
            yield item
    finally:
        with suppress(Exception):  # its result is not needed
            await making


class Pulse:
    """Wakes all waiters at each change.

    A waiter looks, and waits for the next beat if it did not find what it wants. One that awaits anything between the
    two takes `upcoming` before it looks, or it could miss a beat.
    """

    def __init__(self) -> None:
        self._upcoming = asyncio.Event()

    @property
    def upcoming(self) -> asyncio.Event:
        return self._upcoming

    def beat(self) -> None:
        beaten, self._upcoming = self._upcoming, asyncio.Event()
        beaten.set()

    async def next(self) -> None:
        await self._upcoming.wait()


class InFlight:
    """Counts requests under way, so that a drain can wait for the last one."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        return self._count

    @contextmanager
    def one(self) -> Iterator[None]:
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    async def idle_within(self, deadline_s: float) -> bool:
        return await set_within(self._idle, deadline_s)


class Pace:
    """A queue for the event loop: in each of its rounds one waiter goes on. Otherwise a thousand rollouts that start
    together take one round of seconds, in which no deadline fires and no health check is answered."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def turn(self) -> None:
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
