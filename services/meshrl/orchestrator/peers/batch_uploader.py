"""Feeds the trainer: uploads recorded batches in order and reports what became of them, over restarts of the trainer.

    upload   consumes recorded batches; waits for the next one, or while the trainer's queue is full. A batch that the
             trainer refuses for its content stops it until the loop withdraws that batch and those behind it
    follow   consumes the trainer's events; when it restarts at step k, both cursors go back to k
    next     gives the loop the next step that is done; unblocked by the trainer's events

`recorded` is the last step whose batch is on disk, `uploaded` the last that the trainer took, `trained` the last that
is done: trained <= uploaded <= recorded, but for steps that were done before this process began.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from opentelemetry import trace

from meshrl.client import TrainerClient
from meshrl.core.waiting import Pulse
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.peers.step_watcher import StepUndoneError, StepWatcher
from meshrl.orchestrator.work.refused_batches import BatchRefusal
from meshrl.sampling.retry import Patience, RunError, failed, persist
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Batch, RunInfo, StepEvent

REFUSALS_IN_A_ROW = 5
"""The run ends when this many batches were refused for their content and none was taken in between."""

_OUT_OF_STEP = frozenset({Reason.STEP_OUT_OF_ORDER, Reason.BATCH_CONFLICT})


class BatchUploader:
    """The steps of one run at the trainer. `on_back(k, n)`: steps k + 1 to n, which were done, are done again.

    `batch_of` raises RunError for a batch that is not kept.
    """

    def __init__(
        self,
        client: TrainerClient,
        *,
        config: OrchestratorConfig,
        run: RunInfo,
        recorded: int,
        trained: int,
        batch_of: Callable[[int], Awaitable[Batch]],
        span_of: Callable[[int], trace.Span],
        on_back: Callable[[int, int], None],
        on_durable: Callable[[int], None],
        on_refused: Callable[[], None],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        """`recorded`: up to which step batches are on disk; `trained`: after which step the loop wants to hear."""
        self.recorded = recorded
        self.trained = trained
        self.uploaded = run.step
        self.refused: BatchRefusal | None = None
        self._changed = Pulse()
        self._client = client
        self._address = config.services.trainer
        self._deadlines = config.deadlines
        self._batch_of = batch_of
        self._span_of = span_of
        self._on_back = on_back
        self._on_refused = on_refused
        self._refusals_in_a_row = 0
        self._clock = clock
        self._sleep = sleep
        self._ended = False
        self._watch = StepWatcher(
            client,
            address=self._address,
            run=run,
            unreachable_s=config.deadlines.unreachable_s,
            history=trained < run.step,
            on_restart=self._go_back,
            on_durable=on_durable,
            clock=clock,
            sleep=sleep,
        )

    @property
    def epoch(self) -> int:
        """The trainer's process, as far as known."""
        return self._watch.epoch

    @property
    def came_back_at(self) -> int:
        """Where the trainer stood when its process was first heard of: no version before that one comes any more."""
        return self._watch.step

    async def restarts(self, epoch: int) -> bool:
        """Waits for the process after `epoch`; False when it does not come for as long as a trainer may be away."""
        return await self._watch.restarts(epoch)

    def add(self, step: int) -> None:
        """The batch of the next step is on disk."""
        assert step == self.recorded + 1, f"step {step} after {self.recorded}"
        self.recorded = step
        self._changed.beat()

    def withdraw(self, step: int) -> None:
        """The batch of `step`, which was refused, and those after it are taken apart: others come in their place."""
        self.recorded = step - 1
        self.uploaded = min(self.uploaded, self.recorded)
        self.refused = None
        self._watch.withdraw(step)
        self._changed.beat()

    def not_taken(self, refusal: BatchRefusal) -> RunError:
        """The error for a batch that the run cannot go on without."""
        return failed("trainer", self._address, f"taking batch {refusal.step}", refusal.error)

    def end(self) -> None:
        """No more batches come."""
        self._ended = True
        self._changed.beat()

    async def place(self, at_most: int) -> None:
        """Returns when fewer than `at_most` batches are at the trainer, or when it has refused one."""
        while self.refused is None and self.recorded - self.trained >= at_most:
            await self._changed.next()

    async def next(self) -> tuple[int, StepEvent] | None:
        """The next step that is done, and its event; None after the last one. Raises RunError."""
        while True:
            if self.trained < self.recorded:
                step = self.trained + 1
                try:
                    event = await self._watch.done(step, self._deadlines.step_s)
                except StepUndoneError:  # the cursors have gone back, or the batch is withdrawn
                    continue
                self.trained = step
                self._changed.beat()
                return step, event
            if self._ended:
                return None
            await self._changed.next()

    async def follow(self) -> None:
        """Until cancelled. Raises RunError when the trainer fails a step, or is gone for too long."""
        await self._watch.follow()

    async def upload(self) -> None:
        """Until cancelled. Raises RunError when the trainer does not take a batch."""
        while True:
            self.uploaded = max(self.uploaded, self.trained)  # done meanwhile: the trainer had it from before
            if self.uploaded >= self.recorded:
                await self._changed.next()
                continue
            step, epoch = self.uploaded + 1, self._watch.epoch
            try:
                batch = await self._batch_of(step)
            except RunError:
                if step > self.trained:
                    raise
                continue  # done while it was read, so that it was kept no longer
            try:
                with trace.use_span(self._span_of(step)):
                    await self._submit(batch)
            except MeshError as error:  # a trainer that has restarted expects an earlier step
                if error.reason in _OUT_OF_STEP and await self._watch.restarts(epoch):
                    continue
                refusal = BatchRefusal(step=step, error=error)
                if error.reason is not Reason.INVALID_REQUEST or self._ended:
                    raise self.not_taken(refusal) from error
                await self._refuse(refusal)
                continue
            self._refusals_in_a_row = 0
            if epoch == self._watch.epoch:
                self.uploaded = step

    async def _refuse(self, refusal: BatchRefusal) -> None:
        """Waits until the loop has taken the batch apart. Raises RunError when that has been done too often."""
        self._refusals_in_a_row += 1
        if self._refusals_in_a_row >= REFUSALS_IN_A_ROW:
            raise RunError(
                f"trainer at {self._address} refused {self._refusals_in_a_row} batches in a row, the last of step"
                f" {refusal.step}: {refusal.error}; leaving out the rollouts at fault has not helped, so see the"
                " trainer's log for what it takes"
            )
        self.refused = refusal
        self._on_refused()
        self._changed.beat()
        while self.refused is not None:
            await self._changed.next()

    async def _submit(self, batch: Batch) -> None:
        patience = Patience(unreachable_s=self._deadlines.unreachable_s, retry_s=self._deadlines.step_s)
        await persist(lambda: self._client.submit_batch(batch), patience, clock=self._clock, sleep=self._sleep)

    def _go_back(self, run: RunInfo) -> None:
        done, self.trained = self.trained, min(self.trained, run.step)
        self.uploaded = run.step
        self._on_back(run.step, done)
        self._changed.beat()
