"""Keeps the state of a run's steps: the waiting batches, the state of each, and the events for watchers.

No clock, sockets or tasks. The TrainingQueue calls it when the service takes a batch and when the training loop reports
a step. A step moves QUEUED -> RUNNING -> DONE or FAILED. Steps are accepted in order,
without gaps. When one fails, those queued behind it fail too, and the failed step is the next to submit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Batch, RunInfo, RunPhase, RunSpec, StepEvent, StepState, Suspension

LARGE_EVENTS = 8
"""Events that keep what is large: logprobs and entropies."""
RETRY_AFTER_S = 0.5  # a queue moves at the pace of steps, which take about this long at least


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The answer to a submitted batch; the same for every repetition."""

    revision: int
    queue_position: int


class Done(TypedDict, total=False):
    """What a step's DONE event carries, as StepEvent."""

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
    """The steps of one run. Raises MeshError for what a client may not do; an AssertionError is a bug in the loop."""

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
    draining: bool = field(init=False, default=False)
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
        """Whether a batch may come in, asked before its upload: the first answer for a repetition, None for a new one.

        Raises BATCH_CONFLICT, STEP_OUT_OF_ORDER, DRAINING or OVERLOADED.
        """
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
        """Queues a whole, verified batch. Raises as `admit`, which is asked again: the state may have changed."""
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
        """The events that follow `revision`.

        Raises REVISION_EXPIRED when some of them are no longer known, or when there is no such revision yet.
        """
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

    def drain(self) -> None:
        """Takes no more batches from here on; those queued still train."""
        self.draining = True

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
        """The next batch to train, now RUNNING; None when none waits."""
        if not self._waiting or self.suspension is not None:
            return None
        batch = self._waiting.popleft()
        self._unfinished.add(batch.step)
        self._move(batch.step, StepState.RUNNING, traceparent=batch.traceparent)
        return batch

    def finish(self, step: int, **done: Unpack[Done]) -> None:
        """The step is trained and its version sealed. Only the newest events keep `logprobs` and `entropies`: they are
        large.
        """
        assert step in self._unfinished, f"step {step} is not running"
        self._unfinished.remove(step)
        self.step, self._update_time = step, time.time()
        self._move(step, StepState.DONE, version=step, **done)
        large = [place for place, event in enumerate(self._events) if event.logprobs or event.entropies is not None]
        for place in large[:-LARGE_EVENTS]:
            self._events[place] = replace(self._events[place], logprobs={}, entropies=None)

    def fail(self, step: int, reason: Reason, message: str, *, traceparent: str = "") -> None:
        """The step left the weights as they were; every step queued behind it fails with it."""
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
            revision=self._revision,
            step=step,
            state=state,
            durable_step=self.durable_step,
            time=time.time(),
            **filled,
        )
        self._events.append(event)
        return event
