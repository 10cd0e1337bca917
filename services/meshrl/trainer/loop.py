"""The training loop of rank 0: takes a batch, makes a step, publishes the version; runs on the training thread.

Consumes batches of each run, in order. Produces a snapshot of the weights for the publisher, and a DONE or
FAILED event a step. Waits for the next batch and, before it captures a version, for the publication of the one before.
Unblocks the orchestrator, which activates a version once its step is DONE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from meshrl.core.metrics.catalogue import Source
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.metrics.statistics import spread
from meshrl.core.telemetry.waits import Waits
from meshrl.trainer.metrics import rollout_logprobs, step_metrics
from meshrl.trainer.publishing.publisher import PublishReport
from meshrl.trainer.ranks.commands import CommandSender, SaveCommand, SnapshotCommand, StopCommand, TrainCommand
from meshrl.trainer.runs.table import RunTable
from meshrl.trainer.runs.work_queue import SaveRequest, TrainingQueue, Work
from meshrl.trainer.spans import TrainSpan, TrainSpans
from meshrl.training.bench.throughput import peak_flops, peak_memory_gib, step_flops
from meshrl.training.checkpoints.checkpointer import Checkpointer, CheckpointError
from meshrl.training.config import CheckpointConfig
from meshrl.training.learner import Learner, StepError, StepResult
from meshrl.training.run_state import RunState
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import Captured
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Batch

MOST_ENTROPIES = 1024
"""Of a step's tokens, sent with its DONE event for a histogram."""


class TrainerLoop:
    """Trains the runs of a table, in turn, until all of their queues are closed."""

    def __init__(
        self,
        table: RunTable,
        runs: Sequence[RunTraining],
        commands: CommandSender,
        *,
        waits: Waits | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end` is called after the last collective."""
        self._table, self._commands, self._waits = table, commands, waits or Waits()
        self._runs = {run.state.run_id: run for run in runs}
        self._on_end = on_end

    def run(self) -> None:
        """Works until the queues close, then writes the last checkpoints. Raises what the trainer cannot survive."""
        try:
            waited_since = time.perf_counter()
            while (taken := self._next_work()) is not None:
                run, work = self._runs[taken[0]], taken[1]
                if isinstance(work, SaveRequest):
                    run.save_on_request(work)
                else:
                    with self._waits.waiting("step", f"its own work on step {work.step}"):
                        run.train_on(work, wait_s=time.perf_counter() - waited_since)
                    waited_since = time.perf_counter()
            for run in self._runs.values():
                run.end()
            self._commands.send(StopCommand())
            for run in self._runs.values():  # as every rank does
                run.checkpointer.wait_for_save()
            self._on_end()
        except BaseException as error:  # reported to every watcher, then raised: the process ends and says why
            for queue in self._table:
                queue.crashed(f"the trainer stopped: {error}")
            raise

    def _next_work(self) -> tuple[str, Work] | None:
        batches = " or ".join(f"batch {run.state.next_step}" for run in self._runs.values())
        with self._waits.waiting("batch", batches, ("orchestrator",)):
            return self._commands.wait(self._table.take())


@dataclass(frozen=True, kw_only=True)
class RunVersions:
    """How the versions of a run leave the trainer."""

    capture: Callable[[int], Captured]
    """Copies the weights of a version aside; collective, on the training thread between two steps."""

    publish: Callable[[int, Captured, str], Future[PublishReport]]
    """(version, what `capture` returned, traceparent) -> a future that is done when the version is published."""

    progress: Progress
    """When the publication under way last moved."""

    stall_s: float
    """Seconds for which a publication may stand still."""


class RunTraining:
    """Trains one run: its steps, versions, checkpoints and metrics. A step that cannot be made fails alone."""

    def __init__(
        self,
        learner: Learner,
        state: RunState,
        queue: TrainingQueue,
        checkpointer: Checkpointer,
        versions: RunVersions,
        commands: CommandSender,
        spans: TrainSpans,
        *,
        ckpt: CheckpointConfig | None,
        waits: Waits | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`release` gives memory that no tensor needs back to the device; called after each snapshot."""
        self.state, self.checkpointer = state, checkpointer
        self._learner, self._queue, self._versions = learner, queue, versions
        self._commands, self._spans, self._waits = commands, spans, waits or Waits()
        self._ckpt = ckpt
        self._release = release
        self._publishing: Future[PublishReport] | None = None
        self._published_step = state.step_done  # the last one whose publication began
        self._save_ckpt_s = 0.0  # since the last DONE
        self._saved_step = state.step_done  # a step that is on disk, or needs no checkpoint
        self._peak_flops = peak_flops(learner.device)

    def end(self) -> None:
        """Waits for the publication under way and writes the last checkpoint; raises the failure of either."""
        self._wait_for_publication()
        if self._ckpt is not None and self.state.step_done != self._saved_step:
            self._save(self._ckpt)

    def train_on(self, batch: Batch, *, wait_s: float) -> None:
        """Makes a step and starts the publication of its version. The loop waited `wait_s` for the batch.

        Raises what the trainer cannot survive: the failure of an earlier publication or save, and UpdateError.
        """
        self.checkpointer.check()
        started = time.perf_counter()
        span = self._spans.start(batch)
        self._commands.send(TrainCommand(run_id=self.state.run_id, batch=batch))
        handed_out = time.perf_counter()
        try:
            result = self._learner.step(self.state, batch.micro_batches)
        except StepError as error:  # the batch's fault: the run goes on with the weights as they are
            logger.error("{}", error)
            span.fail(str(error))
            self._queue.failed(batch.step, Reason.STEP_FAILED, str(error), traceparent=span.traceparent)
            return
        stepped = time.perf_counter()
        span.child("forward_backward", result.forward_backward_s, before_s=result.optimizer_s)
        span.child("optimizer", result.optimizer_s)
        self._wait_for_publication()  # versions are sealed in order
        published_before = time.perf_counter()
        self._commands.send(SnapshotCommand(run_id=self.state.run_id))
        self._learner.take_up(self.state)
        captured = self._versions.capture(result.step)  # the next step changes the live weights
        self._release()  # once the version is published, an engine may need the room
        ended = time.perf_counter()
        timings_s = {
            "wait_for_batch": wait_s,
            "broadcast_batch": handed_out - started,
            "forward_backward": result.forward_backward_s,
            "optimizer": result.optimizer_s,
            "wait_for_publication": published_before - stepped,
            "gather_weights": ended - published_before,
            "step": wait_s + ended - started,
        }
        metrics = self._metrics(batch, result, timings_s, ended - started)
        logprobs = rollout_logprobs(batch, result.tokens.logprobs)
        entropies = result.tokens.entropies[spread(len(result.tokens.entropies), MOST_ENTROPIES)]
        self._start_publication(result.step, captured, metrics, timings_s, span, logprobs, entropies)
        logger.info(
            "step {} | loss {:.4f} | grad norm {:.3f} | mismatch kl {:.2e} | {:.0f} tokens/s | {:.2f} s, wait {:.2f} s",
            result.step,
            result.loss,
            result.grad_norm,
            metrics.get("mismatch_kl/all/mean", 0.0),  # a batch may have no rl tokens
            metrics["perf/throughput"],
            ended - started,
            wait_s,
        )
        if self._ckpt is not None and self._ckpt.interval and result.step % self._ckpt.interval == 0:
            self._save(self._ckpt)

    def _start_publication(
        self,
        step: int,
        captured: Captured,
        metrics: Mapping[str, float],
        timings_s: Mapping[str, float],
        span: TrainSpan,
        logprobs: Mapping[str, NDArray[np.float32]],
        entropies: NDArray[np.float32],
    ) -> None:
        """Starts the publication of a version; the step is DONE when the hub has sealed it."""
        started = time.perf_counter()

        def announce(done: Future[PublishReport]) -> None:
            if done.cancelled():  # the event loop is gone, and with it all watchers of this step
                return
            publish_s = time.perf_counter() - started
            span.child("publish", publish_s)
            error = done.exception()
            if error is not None:
                message = f"version {step} could not be published: {error}"
                span.fail(message)
                self._queue.crashed(message)
                return
            span.end()
            lengths_s = {"publish": publish_s}
            lengths_s |= {f"publish_{part}": length_s for part, length_s in done.result().parts_s.items()}
            published = {f"time/{name}": length_s for name, length_s in lengths_s.items()}
            self._queue.finished(
                step,
                metrics={**metrics, **CATALOGUE.record(Source.TRAINER, published)},
                timings_s={**timings_s, **lengths_s},
                traceparent=span.traceparent,
                logprobs=logprobs,
                entropies=entropies,
            )

        self._versions.progress.moved()
        self._published_step = step
        self._publishing = self._versions.publish(step, captured, span.traceparent)
        self._publishing.add_done_callback(announce)

    def _metrics(
        self, batch: Batch, result: StepResult, timings_s: Mapping[str, float], train_s: float
    ) -> dict[str, float]:
        """All metrics of a step. Throughput counts the samples' tokens over the time not spent waiting for a batch.

        A prefix that samples share counts for each of them. `progress/total_*` count what this trainer has trained:
        tokens and samples, as its checkpoints have them.
        """
        tokens = sum(len(row.token_ids) + row.shared_tokens for row in batch.micro_batches)
        samples = sum(len(row.rollout_ids) for row in batch.micro_batches)
        progress = self.checkpointer.progress
        progress.tokens += tokens
        progress.samples += samples
        flops = step_flops(self._learner.model, batch.micro_batches)
        metrics = step_metrics(result, batch.environments)
        metrics |= {
            "perf/throughput": tokens / train_s,
            "perf/throughput_per_gpu": tokens / train_s / self._learner.parallel.plan.world_size,
            "perf/mfu": flops / train_s / self._peak_flops / self._learner.parallel.plan.world_size,
            "perf/peak_memory": peak_memory_gib(self._learner.device),
            **{f"time/{stage}": length_s for stage, length_s in timings_s.items()},
            "time/save_ckpt": self._save_ckpt_s,
            "progress/step": float(result.step),
            "progress/total_tokens": float(progress.tokens),
            "progress/total_samples": float(progress.samples),
        }
        self._save_ckpt_s = 0.0
        return CATALOGUE.record(Source.TRAINER, metrics)

    def _wait_for_publication(self) -> None:
        """Waits for the publication under way. Raises when it failed, since engines would get no more versions.

        Raises MeshError DEADLINE_PASSED when it stood still for too long.
        """
        publishing, self._publishing = self._publishing, None
        if publishing is None:
            return
        version = f"version {self._published_step} to be taken by the weight hub"
        try:
            with self._waits.waiting("publication", version, ("weights",)):
                self._commands.wait(publishing, progress=self._versions.progress, stall_s=self._versions.stall_s)
        except TimeoutError as error:
            if publishing.done():  # its own
                raise
            text = f"version {self._published_step} could not be published: {error} (publish_deadline_s)"
            raise MeshError(
                Reason.DEADLINE_PASSED, f"{text}; look whether the weight hub and its disk are well"
            ) from error

    def _save(self, config: CheckpointConfig) -> None:
        """A checkpoint as configured; one in the background costs the time to copy the state."""
        started = time.perf_counter()
        self._commands.send(
            SaveCommand(run_id=self.state.run_id, weights_only=config.weights_only, in_background=config.save_async)
        )

        def durable(step: int, folder: Path) -> None:
            if not config.weights_only:
                self._queue.saved(step)
            logger.info("checkpoint of step {} in {}", step, folder)

        self.checkpointer.save_as(config, durable)
        self._saved_step = self.state.step_done
        self._save_ckpt_s += time.perf_counter() - started

    def save_on_request(self, request: SaveRequest) -> None:
        """Writes a checkpoint now; a failure is the caller's, and training goes on."""
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
            self._queue.saved(self.state.step_done)
        if self._ckpt is not None:
            self.checkpointer.prune(self._ckpt)  # which spares what was asked for: it is the newest
        request.saved.set_result((self.state.step_done, path))
