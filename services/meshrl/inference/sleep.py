"""Puts an engine without work to sleep, which gives its GPU memory back, and wakes it when it is needed.

After a failure the state of the memory is unknown: nothing is tried again, and the engine stays unfit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from meshrl.wire.errors import MeshError, Reason

Result = TypeVar("Result")


class Sleeper:
    """Sleeping and waking take turns under one lock and finish without their caller, so an engine is never half
    asleep."""

    def __init__(
        self,
        fall_asleep: Callable[[], Awaitable[None]],
        wake_up: Callable[[], Awaitable[None]],
        *,
        busy: Callable[[], bool],
        deadline_s: float,
    ) -> None:
        """`busy`: whether work keeps the engine awake. Each way may take `deadline_s`."""
        self.sleeping = False
        self.failed: str | None = None
        self._fall_asleep, self._wake_up, self._busy = fall_asleep, wake_up, busy
        self._deadline_s = deadline_s
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def sleep(self) -> bool:
        """Returns whether the engine sleeps. Raises MeshError ENGINE_FAILED."""
        return await self._to_its_end(self._sleep())

    async def wake(self) -> None:
        """Returns once it is awake. Raises MeshError ENGINE_FAILED."""
        if self.sleeping or self._lock.locked():
            await self._to_its_end(self._wake())
        self._check()

    async def _sleep(self) -> bool:
        async with self._lock:
            self._check()
            if not self.sleeping and not self._busy():
                await self._within_deadline("falling asleep", self._fall_asleep)
                self.sleeping = True
            return self.sleeping

    async def _wake(self) -> None:
        async with self._lock:
            self._check()
            if self.sleeping:
                await self._within_deadline("waking up", self._wake_up)
                self.sleeping = False

    def _check(self) -> None:
        if self.failed is not None:
            raise MeshError(Reason.ENGINE_FAILED, self.failed)

    async def _within_deadline(self, doing: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await work()
        except TimeoutError as error:
            raise self._fail(f"{doing} took longer than {self._deadline_s:g} s") from error
        except MeshError as error:
            raise self._fail(f"{doing} failed: {error.message}") from error
        except Exception as error:  # whatever it was, nobody knows what memory there is
            raise self._fail(f"{doing} failed: {error!r}") from error

    def _fail(self, what: str) -> MeshError:
        self.failed = f"{what}; its memory is in no known state, so start the engine anew"
        return MeshError(Reason.ENGINE_FAILED, self.failed)

    async def _to_its_end(self, work: Coroutine[None, None, Result]) -> Result:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # kept in `failed`, where nobody waits for it any more
