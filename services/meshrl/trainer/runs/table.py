"""The runs that a trainer trains: TrainerService finds a run's queue by its id, the training thread takes from all.

A trainer begins with its runs and holds no others so far: the service refuses to create and to delete any.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from meshrl.core.waiting import Pulse
from meshrl.trainer.runs.steps import StepBook
from meshrl.trainer.runs.work_queue import TrainingQueue, Work
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid


class RunTable:
    """The queue of each run. Made on the event loop that serves them."""

    def __init__(self, own: StepBook, *more: StepBook, held: bool = False) -> None:
        """An empty run_id stands for `own`. With `held` no queue gives work out until its `open` is called."""
        self._loop = asyncio.get_running_loop()
        self._changed = Pulse()
        self.own = TrainingQueue(own, self._changed, held=held)
        queues = [self.own, *(TrainingQueue(book, self._changed, held=held) for book in more)]
        self._queues = {queue.book.run_id: queue for queue in queues}
        self._in_turn = deque(queues)

    def __iter__(self) -> Iterator[TrainingQueue]:
        return iter(self._queues.values())

    def find(self, run_id: str) -> TrainingQueue:
        """The run of this name; an empty one is the only run. Raises UNKNOWN_RUN, and INVALID_REQUEST with several."""
        if not run_id and len(self._queues) > 1:
            raise invalid([FieldViolation("run_id", f"must name one of {', '.join(self._queues)}")], "the request")
        queue = self._queues.get(run_id) if run_id else self.own
        if queue is None:
            held = ", ".join(map(repr, self._queues))
            raise MeshError(Reason.UNKNOWN_RUN, f"no run {run_id!r} here; this trainer holds {held}")
        return queue

    def take(self) -> Future[tuple[str, Work] | None]:
        """The next work and its run, once there is some; None when all queues are closed. For the training thread.

        The run whose work was taken last comes after all others.
        """
        return asyncio.run_coroutine_threadsafe(self._next_work(), self._loop)

    async def _next_work(self) -> tuple[str, Work] | None:
        while not all(queue.closed for queue in self):
            for queue in self._in_turn:
                if (work := queue.poll()) is not None:
                    self._in_turn.remove(queue)
                    self._in_turn.append(queue)
                    return queue.book.run_id, work
            await self._changed.next()
        return None
