"""The runs of a trainer: the service finds a queue by its id, the training thread takes work from all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from meshrl.core.waiting import Pulse
from meshrl.trainer.ranks.thread import promised
from meshrl.trainer.runs.steps import StepBook, TrainingQueue, Work
from meshrl.wire.errors import FieldViolation, MeshError, Reason, invalid

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Calls, which come first, and one piece of work of each run."""

    calls: tuple[Callable[[], None], ...]
    work: Mapping[str, Work]


class RunTable:
    """The queue of each run. Made on the event loop that serves them."""

    def __init__(self, own: StepBook, *, held: bool = False, complete: bool = True) -> None:
        """`held`: the own queue gives no work out until its `open` is called. Until it is `complete`, runs of an
        earlier start may still come."""
        self.complete = complete
        self._loop = asyncio.get_running_loop()
        self.changed = Pulse()
        self._calls: list[tuple[Callable[[], None], Future[Any]]] = []
        self._queues: dict[str, TrainingQueue] = {}
        self.own = TrainingQueue(own, self.changed, held=held)
        self.put(self.own)

    def __iter__(self) -> Iterator[TrainingQueue]:
        return iter(self._queues.values())

    def put(self, queue: TrainingQueue) -> None:
        self._queues[queue.book.run_id] = queue

    def remove(self, run_id: str) -> None:
        del self._queues[run_id]

    def check_complete(self) -> None:
        """Raises MeshError UNREACHABLE while the trainer still makes the runs of its last start."""
        if not self.complete:
            text = "the trainer still makes the runs of its last start; try again"
            raise MeshError(Reason.UNREACHABLE, text, retry_after_s=1.0)

    def close(self) -> None:
        for queue in self:
            queue.close()

    def find(self, run_id: str) -> TrainingQueue:
        """The run of this name; an empty one is the only run.

        Raises MeshError UNKNOWN_RUN, INVALID_REQUEST for an empty name with several, and as `check_complete`.
        """
        if not run_id and len(self._queues) > 1:
            raise invalid([FieldViolation("run_id", f"must name one of {', '.join(self._queues)}")], "the request")
        queue = self._queues.get(run_id) if run_id else self.own
        if queue is None:
            self.check_complete()
            held = ", ".join(map(repr, self._queues))
            raise MeshError(Reason.UNKNOWN_RUN, f"no run {run_id!r} here; this trainer holds {held}")
        return queue

    async def call(self, work: Callable[[], Result]) -> Result:
        """Has the training thread run `work` between two turns. Raises its error, and DRAINING when the trainer ends
        before."""
        if self.own.closed:
            raise MeshError(Reason.DRAINING, "the trainer ends; ask the next one")
        run, done = promised(work)
        self._calls.append((run, done))
        self.changed.beat()
        return await asyncio.wrap_future(done)

    def take(self, idle: Set[str], *, wait: bool, until: Callable[[], bool] = lambda: False) -> Future[Taken | None]:
        """All calls, and the next work of each of the `idle` runs; None once the own queue is closed. With `wait` it is
        done once there is something, or `until` holds after a report."""
        return asyncio.run_coroutine_threadsafe(self._take(idle, wait, until), self._loop)

    async def _take(self, idle: Set[str], wait: bool, until: Callable[[], bool]) -> Taken | None:
        while not self.own.closed:
            work = {
                queue.book.run_id: polled
                for queue in self
                if queue.book.run_id in idle and (polled := queue.poll()) is not None
            }
            if work or self._calls or not wait or until():
                calls, self._calls = tuple(run for run, _ in self._calls), []
                return Taken(calls=calls, work=work)
            await self.changed.next()
        for _, done in self._calls:
            done.set_exception(MeshError(Reason.DRAINING, "the trainer ends; ask the next one"))
        self._calls = []
        return None
