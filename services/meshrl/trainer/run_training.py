"""Trains one run on rank 0: its steps, versions, checkpoints and metrics.

A step's slices are passed, then it is made, then its version is captured, once the version before is published. A
failure in an added run suspends that run alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from loguru import logger
from opentelemetry import trace

from meshrl.core.metrics.catalogue import Source
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.metrics.statistics import spread
from meshrl.core.telemetry.waits import Waits
from meshrl.trainer.metrics import rollout_logprobs, step_metrics
from meshrl.trainer.publishing.publisher import PublishReport
from meshrl.trainer.ranks.batch_step import BatchStep, Outcome, pass_slices
from meshrl.trainer.ranks.commands import CommandSender, PassCommand, SaveCommand, SnapshotCommand, TrainCommand
from meshrl.trainer.ranks.rank_runs import RankRun
from meshrl.trainer.runs.steps import Done, SaveRequest, TrainingQueue
from meshrl.trainer.spans import TrainSpan
from meshrl.training.checkpoints.checkpointer import CheckpointError
from meshrl.training.config import CheckpointConfig
from meshrl.training.joined_rows import kinds
from meshrl.training.learner import Learner, StepError, StepResult, UpdateError
from meshrl.training.step_metrics import DeviceUse
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import Captured
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Batch, Suspension

MOST_ENTROPIES = 1024
"""Of a step's tokens, sent with its DONE event for a histogram."""


@dataclass(frozen=True, kw_only=True)
class RunVersions:
    capture: Callable[[int], Captured]
    """Copies the weights of a version. Collective, between two steps."""

    publish: Callable[[int, Captured, str], Future[PublishReport]]
    """(version, captured, traceparent) -> a future that is done once the version is published."""

    progress: Progress
    """When the publication under way last moved."""

    stall_s: float
    """Seconds for which a publication may stand still."""


@dataclass(kw_only=True)
class _StepAtHand:
    batch: Batch
    work: BatchStep
    span: TrainSpan
    wait_s: float
    began: float
    broadcast_s: float
    busy_s: float  # so far, without the turns of other runs
    result: StepResult | None = None  # once it is made
    made_at: float = 0.0


class RunTraining:
    """One run on rank 0. `own`: it is the trainer's own, whose failures end the trainer."""

    def __init__(
        self,
        learner: Learner,
        run: RankRun,
        queue: TrainingQueue,
        versions: RunVersions,
        commands: CommandSender,
        tracer: trace.Tracer,
        *,
        ckpt: CheckpointConfig | None,
        own: bool = True,
        max_failed_steps: int = 3,
        waits: Waits | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.state, self.checkpointer, self.own, self.queue = run.state, run.checkpointer, own, queue
        self._learner, self._versions = learner, versions
        self._commands, self._tracer, self._waits = commands, tracer, waits or Waits()
        self._ckpt = ckpt
        self._max_failed_steps = max_failed_steps
        self._failed_steps = 0  # in a row
        self.lost = False
        """Its weights are half updated, so it is to be made anew. Never of the own run, whose loss ends the trainer."""
        self._release = release
        self._step: _StepAtHand | None = None
        self._free_since = time.perf_counter()  # when the step before was over
        self._publishing: Future[PublishReport] | None = None
        self._publish: Callable[[], None] | None = None  # starts the publication under way once more
        self._stalled = False
        self._published_step = run.state.step_done  # the last one whose publication began
        self._save_ckpt_s = 0.0  # since the last DONE
        self._saved_step = run.state.step_done  # a step that is on disk, or needs no checkpoint
        self._use = DeviceUse(learner)

    # --- what the loop asks ---------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return self._step is None

    @property
    def tokens(self) -> int | None:
        """Of the slice that it would train at its turn; 0 if it would capture a version, None without work."""
        if self._step is None:
            return None
        if self._step.result is None:
            return sum(len(row.token_ids) for row in self._step.work.next_rows())
        published = self._publishing is None or self._publishing.done()
        return 0 if published and not self._failed_publication() else None

    @property
    def slices_left(self) -> int:
        return 0 if self._step is None else self._step.work.slices_left

    @property
    def joinable(self) -> tuple[int, Hashable] | None:
        """The longest row of its next slice, and a key that rows of one pass share; None: it shares no pass."""
        if self._step is None or self._step.result is not None or not self._learner.joins(self.state):
            return None
        rows = self._step.work.next_rows()
        return max(len(row.token_ids) for row in rows), kinds(rows)

    def publication_left_s(self) -> float:
        """Until the publication under way has stood still for too long; infinite without one."""
        if self._publishing is None or self._publishing.done() or self._stalled:
            return float("inf")
        return self._versions.progress.left_s(self._versions.stall_s)

    def check_publication(self) -> None:
        """Suspends a run whose publication stands still. Raises MeshError for the own."""
        if self.publication_left_s() > 0:
            return
        problem = self._stuck()
        if self.own:
            self._publishing = None
            raise problem
        self._stalled = True
        self._suspend(problem.reason, problem.message)

    def resume(self) -> None:
        """Goes on after a suspension. A publication that failed is tried again."""
        self._stalled, self._failed_steps = False, 0
        self._versions.progress.moved()
        if self._failed_publication() and self._publish is not None:
            self._publish()

    def _failed_publication(self) -> bool:
        return not self.own and self._publishing is not None and self._publishing.done() and (
            self._publishing.cancelled() or self._publishing.exception() is not None
        )  # fmt: skip

    def _suspend(self, reason: Reason, message: str) -> None:
        logger.error("run {!r} is suspended: {}", self.state.run_id, message)
        self.queue.suspend(Suspension(reason=reason.name, message=message))

    # --- its turns, on the training thread --------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """Raises the failure of an earlier save of the own run."""
        try:
            self.checkpointer.check()
        except CheckpointError as error:
            if self.own:
                raise
            self._suspend(Reason.CHECKPOINT_FAILED, str(error))
        began = time.perf_counter()
        self._commands.send(TrainCommand(run_id=self.state.run_id, micro_batches=batch.micro_batches))
        broadcast_s = time.perf_counter() - began
        self._step = _StepAtHand(
            batch=batch,
            work=BatchStep(self.state, batch.micro_batches),
            span=TrainSpan(self._tracer, batch),
            wait_s=began - self._free_since,
            began=began,
            broadcast_s=broadcast_s,
            busy_s=broadcast_s,
        )

    def advance(self, slices: int, beside: Sequence[RunTraining] = ()) -> None:
        """Trains the next slices of the step at hand, together with those of the `joinable` runs `beside` it; or
        captures its version.

        Raises what ends the trainer: of the own run a failed publication or save, and UpdateError.
        """
        assert self._step is not None, "a turn is given to a run that has something to do"
        if self._step.result is not None:
            self._capture(self._step, self._step.result)
            return
        runs, works = [self, *beside], []
        for run in runs:
            assert run._step is not None
            works.append(run._step.work)
        tokens = [run.tokens or 0 for run in runs]
        started = time.perf_counter()
        others = tuple(run.state.run_id for run in beside)
        self._commands.send(PassCommand(run_id=self.state.run_id, slices=slices, beside=others))
        made = pass_slices(self._learner, works, slices)
        busy_s = time.perf_counter() - started
        for run, of_it, result in zip(runs, tokens, made, strict=True):
            run._passed(result, busy_s * of_it / max(1, sum(tokens)))

    def _passed(self, made: Outcome, busy_s: float) -> None:
        step = self._step
        assert step is not None
        step.busy_s += busy_s
        if isinstance(made, UpdateError):
            if self.own:
                raise made
            self.lost = True
            self._fail(step, str(made))
        elif isinstance(made, StepError):  # the batch's fault: the run goes on with the weights as they are
            self._fail(step, str(made))
        elif made is not None:
            step.result, step.made_at = made, time.perf_counter()
            step.span.child("forward_backward", made.forward_backward_s, before_s=made.optimizer_s)
            step.span.child("optimizer", made.optimizer_s)
            if self.tokens is not None:
                self._capture(step, made)

    def _fail(self, step: _StepAtHand, message: str) -> None:
        logger.error("run {!r}: {}", self.state.run_id, message)
        step.span.fail(message)
        batch = step.batch
        self._step, self._free_since = None, time.perf_counter()
        self._failed_steps += 1
        suspension = None
        if self.lost:
            suspension = Suspension(reason=Reason.STEP_FAILED.name, message=message)
        elif not self.own and self._failed_steps >= self._max_failed_steps:
            self._failed_steps = 0
            suspension = Suspension(
                reason=Reason.STEP_FAILED.name,
                message=f"{self._max_failed_steps} steps in a row failed (max_failed_steps), the last with: {message}",
            )
        self.queue.failed(
            batch.step, Reason.STEP_FAILED, message, traceparent=step.span.traceparent, suspension=suspension
        )

    def _capture(self, step: _StepAtHand, result: StepResult) -> None:
        published_before = time.perf_counter()
        self._wait_for_publication()  # which is over, or failed: versions are sealed in order
        self._failed_steps = 0
        self._commands.send(SnapshotCommand(run_id=self.state.run_id))
        self._learner.take_up(self.state)
        captured = self._versions.capture(result.step)  # the next step changes the live weights
        self._release()  # once the version is published, an engine may need the room
        ended = time.perf_counter()
        train_s = step.busy_s + ended - step.made_at
        timings_s = {
            "wait_for_batch": step.wait_s,
            "broadcast_batch": step.broadcast_s,
            "forward_backward": result.forward_backward_s,
            "optimizer": result.optimizer_s,
            "wait_for_publication": published_before - step.made_at,
            "gather_weights": ended - published_before,
            "step": step.wait_s + ended - step.began,
        }
        metrics = self._metrics(step.batch, result, timings_s, train_s)
        done = Done(
            metrics=metrics,
            timings_s=timings_s,
            traceparent=step.span.traceparent,
            logprobs=rollout_logprobs(step.batch, result.tokens.logprobs, step.work.passes),
            entropies=result.tokens.entropies[spread(len(result.tokens.entropies), MOST_ENTROPIES)],
        )
        self._step, self._free_since = None, ended
        self._start_publication(result.step, captured, step.span, done)
        logger.info(
            "{} | loss {:.4f} | grad norm {:.3f} | mismatch kl {:.2e} | {:.0f} tokens/s | {:.2f} s, wait {:.2f} s",
            f"step {result.step}" if self.own else f"run {self.state.run_id!r}, step {result.step}",
            result.loss,
            result.grad_norm,
            metrics.get("mismatch_kl/all/mean", 0.0),  # a batch may have no rl tokens
            metrics["perf/throughput"],
            train_s,
            step.wait_s,
        )
        if self._ckpt is not None and self._ckpt.interval and result.step % self._ckpt.interval == 0:
            self._save_by_schedule(self._ckpt)

    def _start_publication(self, step: int, captured: Captured, span: TrainSpan, done: Done) -> None:
        started, tokens = time.perf_counter(), self.checkpointer.progress.tokens

        def announce(published: Future[PublishReport]) -> None:
            if published.cancelled():  # the event loop is gone, and with it all watchers of this step
                return
            publish_s = time.perf_counter() - started
            error = published.exception()
            if error is not None:
                message = f"version {step} could not be published: {error}"
                if not self.own:  # once it is resumed, it is published again
                    self._suspend(error.reason if isinstance(error, MeshError) else Reason.INTERNAL, message)
                    return
                span.child("publish", publish_s)
                span.fail(message)
                self.queue.crashed(message)
                return
            self._publish = None
            span.child("publish", publish_s)
            span.end()
            report = published.result()
            lengths_s = {"publish": publish_s, **{f"publish_{part}": s for part, s in report.parts_s.items()}}
            measured = CATALOGUE.record(Source.TRAINER, {f"time/{name}": s for name, s in lengths_s.items()})
            done["metrics"], done["timings_s"] = {**done["metrics"], **measured}, {**done["timings_s"], **lengths_s}
            done["artifact_id"] = report.artifact_id
            self.queue.finished(step, tokens=tokens, **done)

        def publish() -> None:
            self._versions.progress.moved()
            self._publishing = self._versions.publish(step, captured, span.traceparent)
            self._publishing.add_done_callback(announce)

        self._published_step = step
        self._publish = None if self.own else publish  # which holds the weights until they are published
        publish()

    def end(self) -> None:
        """Completes step and publication, and writes the last checkpoint. Raises failures of the own run, and logs
        those of another."""
        try:
            while self._step is not None:
                if self._step.result is not None:
                    self._wait_for_publication()
                self.advance(self.slices_left)
            self._wait_for_publication()
        except (MeshError, OSError) as error:  # of a publication
            if self.own:
                raise
            logger.error("run {!r}: {}", self.state.run_id, error)
        if self._ckpt is not None and self.state.step_done != self._saved_step:
            self._save_by_schedule(self._ckpt)

    def _metrics(
        self, batch: Batch, result: StepResult, timings_s: Mapping[str, float], train_s: float
    ) -> dict[str, float]:
        """Throughput leaves out the wait for a batch, and counts a shared prefix for each sample."""
        tokens = sum(len(row.token_ids) + row.shared_tokens for row in batch.micro_batches)
        samples = sum(len(row.rollout_ids) for row in batch.micro_batches)
        progress = self.checkpointer.progress
        progress.tokens += tokens
        progress.samples += samples
        metrics = step_metrics(result, batch.environments)
        metrics |= self._use.metrics(batch.micro_batches, tokens=tokens, seconds=train_s)
        metrics |= {
            **{f"time/{stage}": length_s for stage, length_s in timings_s.items()},
            "time/save_ckpt": self._save_ckpt_s,
            "progress/step": float(result.step),
            "progress/total_tokens": float(progress.tokens),
            "progress/total_samples": float(progress.samples),
        }
        self._save_ckpt_s = 0.0
        return CATALOGUE.record(Source.TRAINER, metrics)

    def _wait_for_publication(self) -> None:
        publishing, self._publishing = self._publishing, None
        if publishing is None:
            return

        def check() -> float:
            left_s = self._versions.progress.left_s(self._versions.stall_s)
            if left_s <= 0:
                raise self._stuck()
            return left_s

        version = f"version {self._published_step} to be taken by the weight hub"
        with self._waits.waiting("publication", version, ("weights",)):
            self._commands.wait(publishing, check=check)

    def _stuck(self) -> MeshError:
        return MeshError(
            Reason.DEADLINE_PASSED,
            f"version {self._published_step} could not be published: nothing moved for {self._versions.stall_s:g} s"
            " (publish_deadline_s); look whether the weight hub and its disk are well",
        )

    def _save_by_schedule(self, config: CheckpointConfig) -> None:
        started = time.perf_counter()
        self._commands.send(
            SaveCommand(run_id=self.state.run_id, weights_only=config.weights_only, in_background=config.save_async)
        )

        def durable(step: int, folder: Path) -> None:
            if not config.weights_only:
                self.queue.saved(step)
            logger.info("checkpoint of step {} in {}", step, folder)

        try:
            self.checkpointer.save_as(config, durable)
        except CheckpointError as error:
            if self.own:
                raise
            self._suspend(Reason.CHECKPOINT_FAILED, f"the checkpoint of step {self.state.step_done}: {error}")
            return
        self._saved_step = self.state.step_done
        self._save_ckpt_s += time.perf_counter() - started

    def save_on_request(self, request: SaveRequest) -> None:
        started = time.perf_counter()
        self._commands.send(SaveCommand(run_id=self.state.run_id, weights_only=request.weights_only))
        try:
            path = self.checkpointer.save(weights_only=request.weights_only)
        except CheckpointError as error:  # a full or read-only disk is the caller's news; training goes on
            request.saved.set_exception(MeshError(Reason.CHECKPOINT_FAILED, f"cannot write the checkpoint: {error}"))
            return
        finally:
            self._save_ckpt_s += time.perf_counter() - started
        if not request.weights_only:
            self.queue.saved(self.state.step_done)
        if self._ckpt is not None:
            self.checkpointer.prune(self._ckpt)  # which spares what was asked for: it is the newest
        request.saved.set_result((self.state.step_done, path))
