"""The training loop of rank 0: takes a batch, makes a step, publishes the version; runs on the training thread.

Consumes batches from the run's queue, in order. Produces a snapshot of the weights for the publisher, and a DONE or
FAILED event a step. Waits for the next batch and, before it captures a version, for the publication of the one before.
Unblocks the orchestrator, which activates a version once its step is DONE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from meshrl.core.metrics.catalogue import Source
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.metrics.statistics import spread
from meshrl.core.telemetry.waits import Waits
from meshrl.trainer.metrics import step_metrics
from meshrl.trainer.publishing.publisher import PublishReport
from meshrl.trainer.ranks.commands import CommandSender, SaveCommand, SnapshotCommand, StopCommand, TrainCommand
from meshrl.trainer.rollout_logprobs import rollout_logprobs
from meshrl.trainer.runs.table import TrainerRun
from meshrl.trainer.runs.work_queue import SaveRequest
from meshrl.trainer.spans import TrainSpan, TrainSpans
from meshrl.training.bench.throughput import peak_flops, peak_memory_gib, step_flops
from meshrl.training.checkpoints.checkpointer import CheckpointError
from meshrl.training.config import CheckpointConfig
from meshrl.training.learner import StepError, StepResult
from meshrl.versions.snapshot import Captured
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Batch

MOST_ENTROPIES = 1024
"""Of a step's tokens, sent with its DONE event for a histogram."""


class TrainerLoop:
    """Trains one run until its queue closes. A step that cannot be made fails alone; anything else ends the trainer."""

    def __init__(
        self,
        run: TrainerRun,
        spans: TrainSpans,
        commands: CommandSender,
        *,
        ckpt: CheckpointConfig | None,
        waits: Waits | None = None,
        release: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`release` gives memory that no tensor needs back to the device; called after each snapshot.

        `on_end` is called after the last collective.
        """
        assert run.versions is not None, "publishing is set up before the first step"
        self._learner, self._run = run.learner, run.state
        self._queue, self._checkpointer = run.queue, run.checkpointer
        self._versions = run.versions
        self._spans, self._commands, self._waits = spans, commands, waits or Waits()
        self._ckpt = ckpt
        self._release, self._on_end = release, on_end
        self._publishing: Future[PublishReport] | None = None
        self._published_step = run.state.step_done  # the last one whose publication began
        self._save_ckpt_s = 0.0  # since the last DONE
        self._saved_step = run.state.step_done  # a step that is on disk, or needs no checkpoint
        self._peak_flops = peak_flops(run.learner.device)

    def run(self) -> None:
        """Works until the queue closes, then writes the last checkpoint. Raises what the trainer cannot survive."""
        try:
            waited_since = time.perf_counter()
            while (work := self._next_work()) is not None:
                if isinstance(work, SaveRequest):
                    self._save_on_request(work)
                else:
                    with self._waits.waiting("step", f"its own work on step {work.step}"):
                        self._train_on(work, wait_s=time.perf_counter() - waited_since)
                    waited_since = time.perf_counter()
            self._wait_for_publication()
            if self._ckpt is not None and self._run.step_done != self._saved_step:
                self._save(self._ckpt)
            self._commands.send(StopCommand())
            self._checkpointer.wait_for_save()  # as every rank does
            self._on_end()
        except BaseException as error:  # reported to every watcher, then raised: the process ends and says why
            self._queue.crashed(f"the trainer stopped: {error}")
            raise

    def _next_work(self) -> Batch | SaveRequest | None:
        """Waits for a batch or for a request to save a checkpoint; None is the end."""
        with self._waits.waiting("batch", f"batch {self._run.next_step}", ("orchestrator",)):
            return self._commands.wait(self._queue.take())

    def _train_on(self, batch: Batch, *, wait_s: float) -> None:
        self._checkpointer.check()
        started = time.perf_counter()
        span = self._spans.start(batch)
        self._commands.send(TrainCommand(run_id=self._run.run_id, batch=batch))
        handed_out = time.perf_counter()
        try:
            result = self._learner.step(self._run, batch.micro_batches)
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
        self._commands.send(SnapshotCommand(run_id=self._run.run_id))
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
        progress = self._checkpointer.progress
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
            SaveCommand(run_id=self._run.run_id, weights_only=config.weights_only, in_background=config.save_async)
        )

        def durable(step: int, folder: Path) -> None:
            if not config.weights_only:
                self._queue.saved(step)
            logger.info("checkpoint of step {} in {}", step, folder)

        self._checkpointer.save_as(config, durable)
        self._saved_step = self._run.step_done
        self._save_ckpt_s += time.perf_counter() - started

    def _save_on_request(self, request: SaveRequest) -> None:
        started = time.perf_counter()
        self._commands.send(SaveCommand(run_id=self._run.run_id, weights_only=request.weights_only))
        try:
            path = self._checkpointer.save(weights_only=request.weights_only)
        except CheckpointError as error:  # a full or read-only disk is the caller's news; training goes on
            request.saved.set_exception(MeshError(Reason.CHECKPOINT_FAILED, f"cannot write the checkpoint: {error}"))
            return
        finally:
            self._save_ckpt_s += time.perf_counter() - started
        if not request.weights_only:
            self._queue.saved(self._run.step_done)
        if self._ckpt is not None:
            self._checkpointer.prune(self._ckpt)  # which spares what was asked for: it is the newest
        request.saved.set_result((self._run.step_done, path))
