"""The queue between the service's event loop and the training thread: batches in one direction, reports in the other.

TrainerService puts batches and save requests in; the training loop takes them out one at a time, through the table of
runs, and reports the outcome of each. The step book is read and written on the event loop only, which gets the thread's
reports in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from meshrl.core.waiting import Pulse
from meshrl.trainer.runs.steps import Accepted, Done, StepBook
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Batch, RunPhase, StepEvent, Suspension


@dataclass(frozen=True, kw_only=True, eq=False)
class SaveRequest:
    """A checkpoint to write between two steps; `saved` gets the step and its folder, or the error."""

    weights_only: bool
    saved: Future[tuple[int, Path]] = field(default_factory=Future)


Work = Batch | SaveRequest


class TrainingQueue:
    """Gives one run's batches and save requests to the training thread, and its reports to watchers.

    Made on the event loop that serves it. With `held` it accepts batches but gives none out until `open` is called.
    """

    def __init__(self, book: StepBook, changed: Pulse, *, held: bool = False) -> None:
        """`changed` beats after each change; the queues of a trainer share it."""
        self.book = book
        self.closed = False
        self.on_suspended: Callable[[], None] = lambda: None
        """Called on the event loop once the trainer has suspended the run."""
        book.phase = RunPhase.CREATING if held else RunPhase.ACTIVE
        self._loop = asyncio.get_running_loop()
        self._changed = changed
        self._saves: deque[SaveRequest] = deque()

    # --- on the event loop --------------------------------------------------------------------

    def submit(self, batch: Batch, digest: str) -> Accepted:
        """Queues a verified batch. Raises MeshError as StepBook.accept."""
        answer = self.book.accept(batch, digest)
        self._changed.beat()
        return answer

    async def watch(self, after_revision: int) -> AsyncIterator[StepEvent]:
        """Events after a revision, history first, then live; ends when the queue closes. Raises REVISION_EXPIRED."""
        while True:
            changed = self._changed.upcoming
            for event in self.book.events_after(after_revision):
                yield event
                after_revision = event.revision
            if self.closed:
                return
            await changed.wait()

    async def save_checkpoint(self, *, weights_only: bool) -> tuple[int, Path]:
        """Has the training thread write a checkpoint after the step it is at; returns its step and folder."""
        if self.closed:
            raise MeshError(Reason.DRAINING, "the trainer has finished; its last checkpoint is on disk if ckpt is on")
        request = SaveRequest(weights_only=weights_only)
        request.saved.set_running_or_notify_cancel()  # a caller that gives up does not cancel the work
        self._saves.append(request)
        self._changed.beat()
        return await asyncio.wrap_future(request.saved)

    async def drain(self) -> int:
        """Takes no more batches and returns the last finished step, once those accepted are trained.

        Those of a suspended run are not waited for.
        """
        self.book.drain()
        while not (self.book.idle or self.closed or self.book.suspension):
            await self._changed.next()
        return self.book.step

    def open(self) -> None:
        self.book.phase = RunPhase.ACTIVE
        self._changed.beat()

    def resume(self) -> None:
        self.book.suspension = None
        self._changed.beat()

    async def at_rest(self) -> None:
        """Returns once no step of the run trains or is being published, or the run is suspended over one."""
        while self.book.unfinished and self.book.suspension is None and not self.closed:
            await self._changed.next()

    def close(self) -> None:
        """Gives out no more work, and ends every watch."""
        self.closed = True
        for request in self._saves:
            request.saved.set_exception(MeshError(Reason.DRAINING, "the trainer ended before it wrote the checkpoint"))
        self._saves.clear()
        self._changed.beat()

    def poll(self) -> Work | None:
        """Takes the next work; None when there is none now."""
        if self.closed or self.book.phase is not RunPhase.ACTIVE:
            return None
        if self._saves:
            return self._saves.popleft()
        batch = self.book.take()
        if batch is not None:
            self._changed.beat()
        return batch

    # --- on the training thread ---------------------------------------------------------------

    def finished(self, step: int, *, tokens: int, **done: Unpack[Done]) -> None:
        """Reports a step as DONE; `tokens` are those that the run has trained in all."""

        def finish() -> None:
            self.book.tokens = tokens
            self.book.finish(step, **done)

        self._report(finish)

    def failed(
        self,
        step: int,
        reason: Reason,
        message: str,
        *,
        traceparent: str = "",
        suspension: Suspension | None = None,
    ) -> None:
        """Reports a step as FAILED, and with a `suspension` that it suspends the run."""

        def fail() -> None:
            self.book.fail(step, reason, message, traceparent=traceparent)
            if suspension is not None:
                self._suspend(suspension)

        self._report(fail)

    def suspend(self, suspension: Suspension) -> None:
        """Suspends the run: what waits stays, and no more is given out or taken in."""
        self._report(lambda: self._suspend(suspension))

    def _suspend(self, suspension: Suspension) -> None:
        self.book.suspension = suspension
        self.on_suspended()

    def saved(self, step: int) -> None:
        self._report(lambda: self.book.saved(step))

    def crashed(self, message: str) -> None:
        """Fails every unfinished step and closes the queue: the training thread cannot go on."""
        self._report(lambda: self.book.fail_all(Reason.STEP_FAILED, message))
        self._loop.call_soon_threadsafe(self.close)

    def _report(self, change: Callable[[], None]) -> None:
        def apply() -> None:
            change()
            self._changed.beat()

        self._loop.call_soon_threadsafe(apply)
