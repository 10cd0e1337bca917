"""Carries out the coordinator's actions, one after the other, in the order in which they were decided.

Filled by the hub, which turns every call and every tick into actions. Since a single task works through them, a command
to an engine never overtakes the log entry that it depends on. An action that fails ends the queue, and all callers that
wait for an action get an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from meshrl.weights.coordinator.states import Action
from meshrl.wire.errors import MeshError, Reason

_T = TypeVar("_T")


class ActionQueue:
    """The actions of one hub. `run` works on them until `fail` is called."""

    def __init__(self, perform: Callable[[Action], Awaitable[None]]) -> None:
        self._perform = perform
        self._queue: asyncio.Queue[tuple[Sequence[Action], asyncio.Future[None]]] = asyncio.Queue()
        self._under_way: asyncio.Future[None] | None = None  # answered once its actions are carried out
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def put(self, actions: Sequence[Action]) -> asyncio.Future[None]:
        """Adds actions; the future is done once all of them are carried out, or has the MeshError why they are not."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.failed.done():
            refuse(done, MeshError(Reason.INTERNAL, f"the hub is shutting down: {self.failed.result()!r}"))
        elif actions:
            self._queue.put_nowait((actions, done))
        else:
            done.set_result(None)
        return done

    async def run(self) -> None:
        """Carries out actions as they come. Raises what one of them raises."""
        while True:
            actions, done = await self._queue.get()
            self._under_way = done
            for action in actions:
                await self._perform(action)
            if not done.done():
                done.set_result(None)

    def fail(self, error: BaseException, answer: MeshError) -> None:
        """Takes no more actions; `answer` is raised for all that wait for one, the one under way included."""
        self.failed.set_result(error)
        if self._under_way is not None:
            refuse(self._under_way, answer)
        self.refuse_all(answer)

    def refuse_all(self, error: MeshError) -> None:
        """Drops the actions that were not begun."""
        while not self._queue.empty():
            refuse(self._queue.get_nowait()[1], error)


def refuse(future: asyncio.Future[_T], error: MeshError) -> None:
    """Ends a future that is not done with an error; it need not be awaited."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # whoever waits still gets it; the ticker does not wait
