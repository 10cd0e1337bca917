"""Uploads batches from disk to the trainer in order, and reports which steps are done, over restarts of the trainer.

upload   a task: sends each batch that is on disk; waits for the next one, or while the trainer's queue is full.
         When the trainer refuses a batch for its content, waits until the loop has withdrawn it and later ones
watcher  its `follow`, a task: reads the trainer's events; when the trainer restarts at step k, all goes back to k
next     waits for the next step to be done and returns the trainer's event for it
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from loguru import logger
from opentelemetry import trace

from meshrl.client import TrainerClient
from meshrl.orchestrator.config import DeadlinesConfig
from meshrl.orchestrator.peers.step_watcher import StepWatcher
from meshrl.orchestrator.run import Run
from meshrl.sampling.retry import Patience, RunError, failed, persist
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import RunInfo, StepEvent

REFUSALS_IN_A_ROW = 5
"""The run ends when so many batches were refused for their content and none was taken in between."""

_OUT_OF_STEP = frozenset({Reason.STEP_OUT_OF_ORDER, Reason.BATCH_CONFLICT})


@dataclass(frozen=True, kw_only=True)
class BatchRefusal:
    """The trainer refused this step's batch for its content."""

    step: int
    error: MeshError


class BatchUploader:
    def __init__(self, client: TrainerClient, run: Run, *, deadlines: DeadlinesConfig) -> None:
        self.refused: BatchRefusal | None = None
        """Nothing is uploaded until it is withdrawn."""
        self.watcher = StepWatcher(
            client,
            run=run.info,
            unreachable_s=deadlines.unreachable_s,
            history=run.steps.trained < run.info.step,
            on_restart=self._on_restart,
            on_durable=run.journal.durable,
            on_suspended=self._on_suspended,
            changed=run.changed,
            clock=run.clock,
        )
        self._client = client
        self._run = run
        self._steps = run.steps
        self._changed = run.changed
        self._deadlines = deadlines
        self._refusals_in_a_row = 0
        self._ended = False

    def add(self, step: int) -> None:
        assert step == self._steps.recorded + 1, f"step {step} after {self._steps.recorded}"
        self._steps.recorded = step
        self._changed.beat()

    def withdraw(self, step: int) -> None:
        """The refused batch of `step` and later ones are undone."""
        self._steps.recorded = step - 1
        self._steps.uploaded = min(self._steps.uploaded, self._steps.recorded)
        self.refused = None
        self._changed.beat()

    def refusal_error(self, refusal: BatchRefusal) -> RunError:
        return failed("trainer", self._client.address, f"taking batch {refusal.step}", refusal.error)

    def end(self) -> None:
        self._ended = True
        self._changed.beat()

    async def wait_for_room(self, at_most: int) -> None:
        """Until fewer than `at_most` batches are at the trainer, or one was refused."""
        while self.refused is None and self._steps.recorded - self._steps.trained >= at_most:
            await self._changed.next()

    async def next(self) -> tuple[int, StepEvent] | None:
        """None after the last one. Raises RunError."""
        steps, deadline_s = self._steps, self._deadlines.step_s
        while True:
            step, epoch = steps.trained + 1, self.watcher.epoch
            if step > steps.recorded:
                if self._ended:
                    return None
                await self._changed.next()
                continue
            try:
                async with asyncio.timeout(deadline_s) as deadline:
                    while (event := self.watcher.take(step)) is None:
                        suspended = bool(steps.suspended)
                        if suspended:
                            deadline.reschedule(None)
                        await self._changed.next()
                        if suspended:
                            deadline.reschedule(asyncio.get_running_loop().time() + deadline_s)
                        if step > steps.recorded or epoch != self.watcher.epoch:  # withdrawn, or done again
                            break
            except TimeoutError:
                raise RunError(
                    f"trainer at {self._client.address} did not finish step {step} within {deadline_s:g} s;"
                    " raise orchestrator.deadlines.step_s if it needs longer"
                ) from None
            if event is not None:
                steps.trained = step
                self._changed.beat()
                return step, event

    async def upload(self) -> None:
        """Raises RunError when the trainer does not take a batch."""
        steps = self._steps
        while True:
            steps.uploaded = max(steps.uploaded, steps.trained)  # done meanwhile: the trainer had it from before
            if steps.uploaded >= steps.recorded:
                await self._changed.next()
                continue
            step, epoch = steps.uploaded + 1, self.watcher.epoch
            try:
                batch = await self._run.batch(step)
            except RunError:
                if step > steps.trained:
                    raise
                continue  # done while it was read, so that it was kept no longer
            try:
                with trace.use_span(self._run.traces.span(step)):
                    patience = Patience(unreachable_s=self._deadlines.unreachable_s, retry_s=self._deadlines.step_s)
                    await persist(partial(self._client.submit_batch, batch), patience, clock=self._run.clock)
            except MeshError as error:  # a trainer that has restarted expects an earlier step
                if error.reason is Reason.RUN_SUSPENDED:
                    continue  # for as long as it takes
                if error.reason in _OUT_OF_STEP and await self.watcher.restarts(epoch):
                    continue
                refusal = BatchRefusal(step=step, error=error)
                if error.reason is not Reason.INVALID_REQUEST or self._ended:
                    raise self.refusal_error(refusal) from error
                await self._wait_for_withdrawal(refusal)
                continue
            self._refusals_in_a_row = 0
            if epoch == self.watcher.epoch:
                steps.uploaded = step

    async def _wait_for_withdrawal(self, refusal: BatchRefusal) -> None:
        self._refusals_in_a_row += 1
        if self._refusals_in_a_row >= REFUSALS_IN_A_ROW:
            raise RunError(
                f"trainer at {self._client.address} refused {self._refusals_in_a_row} batches in a row, the last of"
                f" step {refusal.step}: {refusal.error}; leaving out the rollouts at fault has not helped, so see the"
                " trainer's log for what it takes"
            )
        self.refused = refusal
        self._changed.beat()
        while self.refused is not None:
            await self._changed.next()

    def _on_suspended(self, why: str) -> None:
        if why == self._steps.suspended:
            return
        if why:
            run_id = self._run.info.run_id
            logger.warning(f"the run {run_id} is suspended: {why}; `meshrl run resume {run_id}` lets it go on")
        else:
            logger.info("the run is no longer suspended")
        self._steps.suspended = why
        self._changed.beat()

    def _on_restart(self, run: RunInfo) -> None:
        done, self._steps.trained = self._steps.trained, min(self._steps.trained, run.step)
        self._steps.uploaded = run.step
        self._run.journal.go_back(run.step, done)
        self._run.plan.rolled_back(run.step)
        self._changed.beat()
