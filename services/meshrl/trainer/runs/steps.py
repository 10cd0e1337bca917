"""A run's steps between the service and the training thread: batches in one direction, reports in the other.

A step moves QUEUED -> RUNNING -> DONE or FAILED. Steps come in order, without gaps. When one fails, those behind it
fail too, and it is the next to submit. The book is read and written on the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from meshrl.core.waiting import Pulse
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Batch, RunInfo, RunPhase, RunSpec, StepEvent, StepState, Suspension

LARGE_EVENTS = 8
"""Events that keep logprobs and entropies."""
RETRY_AFTER_S = 0.5  # a queue moves at the pace of steps, which take about this long at least


@dataclass(frozen=True, kw_only=True)
class Accepted:
    revision: int
    queue_position: int


class Done(TypedDict, total=False):
    """Fields of a DONE StepEvent."""

    metrics: Mapping[str, float]
    timings_s: Mapping[str, float]
    logprobs: Mapping[str, NDArray[np.float32]]
    entropies: NDArray[np.float32] | None
    traceparent: str
    artifact_id: str


class _Filled(Done, total=False):
    version: int
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    digest: str
    answer: Accepted
    state: StepState


@dataclass(kw_only=True)
class StepBook:
    """The rules about the steps of one run. Raises MeshError for what a client may not do."""

    run_id: str
    epoch: int
    start_step: int = 0  # the step that made the weights this process started with
    durable_step: int = 0  # the last step that a checkpoint on disk holds
    max_queued: int = 2
    max_steps: int | None = None
    history_events: int = 1_000
    checkpoints: Path | None = None  # the folder that the run's are in
    spec: RunSpec | None = None
    create_time: float | None = None  # seconds of the epoch
    adapter_bytes: int = 0
    phase: RunPhase = RunPhase.ACTIVE
    suspension: Suspension | None = None
    tokens: int = 0
    used_share: float | None = None
    step: int = field(init=False)  # the last DONE
    draining: bool = False  # takes no more batches; those queued still train
    _next_step: int = field(init=False)
    _update_time: float | None = field(init=False, default=None)  # when `step` was DONE
    _revision: int = field(init=False, default=0)
    _waiting: deque[Batch] = field(init=False, default_factory=deque)
    _unfinished: set[int] = field(init=False, default_factory=set)  # RUNNING: training, or trained and publishing
    _attempts: dict[int, _Attempt] = field(init=False, default_factory=dict)
    _events: deque[StepEvent] = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.start_step
        self._next_step = self.start_step + 1
        self._events = deque(maxlen=self.history_events)

    # --- what clients ask ---------------------------------------------------------------------

    def admit(self, step: int, digest: str) -> Accepted | None:
        """The first answer to a repeated batch, None to a new one that may come in. Raises BATCH_CONFLICT,
        STEP_OUT_OF_ORDER, DRAINING, RUN_SUSPENDED or OVERLOADED."""
        known = self._attempts.get(step)
        if known is not None and known.digest == digest:
            return known.answer
        if known is not None and not (known.state is StepState.FAILED and step == self._next_step):
            raise MeshError(
                Reason.BATCH_CONFLICT,
                f"step {step} of run {self.run_id!r} was submitted with digest {known.digest}, now {digest}; "
                "submit a step once, or repeat it unchanged",
            )
        if self.draining:
            raise MeshError(Reason.DRAINING, "the trainer is draining and takes no more batches")
        if self.suspension is not None:
            raise MeshError(
                Reason.RUN_SUSPENDED,
                f"run {self.run_id!r} is suspended: {self.suspension.message}; mend that and call ResumeRun",
                retry_after_s=RETRY_AFTER_S,
            )
        if self.max_steps is not None and step > self.max_steps:
            raise MeshError(
                Reason.STEP_OUT_OF_ORDER, f"step {step} is beyond max_steps {self.max_steps}; raise it to go on"
            )
        if step != self._next_step:
            raise MeshError(
                Reason.STEP_OUT_OF_ORDER,
                f"the next step of run {self.run_id!r} is {self._next_step}, got {step}; submit steps in order",
            )
        if len(self._waiting) >= self.max_queued:
            raise MeshError(
                Reason.OVERLOADED,
                f"{len(self._waiting)} batches wait already (max_queued_batches); try again when a step is done",
                retry_after_s=RETRY_AFTER_S,
            )
        return None

    def accept(self, batch: Batch, digest: str) -> Accepted:
        """Queues a whole, verified batch. Raises as `admit`, whose answer may have changed."""
        answer = self.admit(batch.step, digest)
        if answer is not None:
            return answer
        position = len(self._waiting) + len(self._unfinished)
        event = self._record(batch.step, StepState.QUEUED, traceparent=batch.traceparent)
        answer = Accepted(revision=event.revision, queue_position=position)
        self._attempts[batch.step] = _Attempt(digest=digest, answer=answer, state=StepState.QUEUED)
        self._attempts.pop(batch.step - self.history_events, None)
        self._waiting.append(batch)
        self._next_step = batch.step + 1
        return answer

    def events_after(self, revision: int) -> tuple[StepEvent, ...]:
        """Raises REVISION_EXPIRED when some of them are no longer known, or there is no such revision yet."""
        oldest = self._revision - len(self._events)
        if revision < oldest:
            raise MeshError(
                Reason.REVISION_EXPIRED,
                f"events up to revision {oldest} are gone, asked for those after {revision}; "
                "read the run's state with GetTrainer and watch from its revision",
                metadata={"oldest_revision": str(oldest)},
            )
        if revision > self._revision:
            raise MeshError(
                Reason.REVISION_EXPIRED,
                f"revision {revision} is ahead of the newest, {self._revision}: the trainer restarted (epoch "
                f"{self.epoch}); watch from 0",
                metadata={"oldest_revision": str(oldest)},
            )
        skip = revision - oldest
        return tuple(event for index, event in enumerate(self._events) if index >= skip)

    def info(self) -> RunInfo:
        return RunInfo(
            run_id=self.run_id,
            step=self.step,
            version=self.step,
            epoch=self.epoch,
            revision=self._revision,
            durable_step=self.durable_step,
            phase=RunPhase.SUSPENDED if self.suspension is not None else self.phase,
            suspension=self.suspension,
            spec=self.spec,
            create_time=self.create_time,
            update_time=self._update_time,
            tokens=self.tokens,
            queued_batches=len(self._waiting),
            used_share=self.used_share,
            oldest_revision=self._revision - len(self._events),
            adapter_bytes=self.adapter_bytes,
        )

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def unfinished(self) -> bool:
        return bool(self._unfinished)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._unfinished

    # --- what the training loop reports -------------------------------------------------------

    def take(self) -> Batch | None:
        """The next batch, now RUNNING; None when none is to be trained."""
        if not self._waiting or self.suspension is not None:
            return None
        batch = self._waiting.popleft()
        self._unfinished.add(batch.step)
        self._move(batch.step, StepState.RUNNING, traceparent=batch.traceparent)
        return batch

    def finish(self, step: int, *, tokens: int = 0, **done: Unpack[Done]) -> None:
        """The step is trained and its version sealed. `tokens` are those that the run has trained in all."""
        assert step in self._unfinished, f"step {step} is not running"
        self._unfinished.remove(step)
        self.step, self.tokens, self._update_time = step, tokens, time.time()
        self._move(step, StepState.DONE, version=step, **done)
        large = [place for place, event in enumerate(self._events) if event.logprobs or event.entropies is not None]
        for place in large[:-LARGE_EVENTS]:
            self._events[place] = replace(self._events[place], logprobs={}, entropies=None)

    def fail(self, step: int, reason: Reason, message: str, *, traceparent: str = "") -> None:
        """The step left the weights as they were. Steps queued behind it fail with it."""
        assert step in self._unfinished, f"step {step} is not running"
        self._unfinished.remove(step)
        self._move(step, StepState.FAILED, reason=reason.name, message=message, traceparent=traceparent)
        while self._waiting:
            behind = self._waiting.popleft()
            self._move(
                behind.step,
                StepState.FAILED,
                reason=reason.name,
                message=f"step {step}, which comes before it, failed: {message}",
                traceparent=behind.traceparent,
            )
        self._next_step = step

    def saved(self, step: int) -> None:
        self.durable_step = max(self.durable_step, step)

    def fail_all(self, reason: Reason, message: str) -> None:
        for step in sorted(self._unfinished, reverse=True):
            self.fail(step, reason, message)

    def _move(self, step: int, state: StepState, **filled: Unpack[_Filled]) -> None:
        self._attempts[step] = replace(self._attempts[step], state=state)
        self._record(step, state, **filled)

    def _record(self, step: int, state: StepState, **filled: Unpack[_Filled]) -> StepEvent:
        self._revision += 1
        event = StepEvent(
            revision=self._revision, step=step, state=state, durable_step=self.durable_step, time=time.time(), **filled
        )
        self._events.append(event)
        return event


@dataclass(frozen=True, kw_only=True, eq=False)
class SaveRequest:
    """A checkpoint to write between two steps; `saved` gets the step and its folder, or the error."""

    weights_only: bool
    saved: Future[tuple[int, Path]] = field(default_factory=Future)


Work = Batch | SaveRequest


class TrainingQueue:
    """One run's batches and save requests for the training thread. Made on the event loop. With `held` it gives nothing
    out until `open`."""

    def __init__(self, book: StepBook, changed: Pulse, *, held: bool = False) -> None:
        """`changed` beats after each change; the queues of a trainer share it."""
        self.book = book
        self.closed = False
        self.on_suspended: Callable[[], None] = lambda: None
        """Called on the event loop."""
        book.phase = RunPhase.CREATING if held else RunPhase.ACTIVE
        self._loop = asyncio.get_running_loop()
        self._changed = changed
        self._saves: deque[SaveRequest] = deque()

    # --- on the event loop --------------------------------------------------------------------

    def submit(self, batch: Batch, digest: str) -> Accepted:
        """Raises as StepBook.accept."""
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
        """Returns step and folder of a checkpoint after the step at hand."""
        if self.closed:
            raise MeshError(Reason.DRAINING, "the trainer has finished; its last checkpoint is on disk if ckpt is on")
        request = SaveRequest(weights_only=weights_only)
        request.saved.set_running_or_notify_cancel()  # a caller that gives up does not cancel the work
        self._saves.append(request)
        self._changed.beat()
        return await asyncio.wrap_future(request.saved)

    async def drain(self) -> None:
        """Takes no more batches; returns once the accepted ones are trained, unless the run is suspended."""
        self.book.draining = True
        while not (self.book.idle or self.closed or self.book.suspension):
            await self._changed.next()

    def open(self) -> None:
        self.book.phase = RunPhase.ACTIVE
        self._changed.beat()

    def resume(self) -> None:
        self.book.suspension = None
        self._changed.beat()

    async def at_rest(self) -> None:
        """Returns once no step trains or is being published, or the run is suspended over one."""
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
        self._report(lambda: self.book.finish(step, tokens=tokens, **done))

    def failed(
        self, step: int, reason: Reason, message: str, *, traceparent: str = "", suspension: Suspension | None = None
    ) -> None:
        def fail() -> None:
            self.book.fail(step, reason, message, traceparent=traceparent)
            if suspension is not None:
                self._suspend(suspension)

        self._report(fail)

    def suspend(self, suspension: Suspension) -> None:
        """Batches that wait stay; none is given out or taken in."""
        self._report(lambda: self._suspend(suspension))

    def _suspend(self, suspension: Suspension) -> None:
        self.book.suspension = suspension
        self.on_suspended()

    def saved(self, step: int) -> None:
        self._report(lambda: self.book.saved(step))

    def crashed(self, message: str) -> None:
        """The training thread cannot go on: fails every unfinished step and closes the queue."""
        self._report(lambda: self.book.fail_all(Reason.STEP_FAILED, message))
        self._loop.call_soon_threadsafe(self.close)

    def _report(self, change: Callable[[], None]) -> None:
        def apply() -> None:
            change()
            self._changed.beat()

        self._loop.call_soon_threadsafe(apply)
