"""The fine-tuning loop: makes steps, validates and saves when it is time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from meshrl.core.metrics.catalogue import Source
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.telemetry.monitor import Monitor
from meshrl.sft.data.batches import SFTBatch
from meshrl.sft.data.conversations import DataError
from meshrl.sft.data.feed import Feed
from meshrl.sft.extras import Extras
from meshrl.training.checkpoints.checkpointer import Checkpointer
from meshrl.training.config import CheckpointConfig
from meshrl.training.learner import Learner, StepResult
from meshrl.training.run_state import RunState
from meshrl.training.step_metrics import DeviceUse, common_metrics, mean

FINAL = "final"  # the weights' name for what comes next, which does not depend on the number of steps


class SFTLoop:
    def __init__(
        self,
        learner: Learner,
        run: RunState,
        feed: Feed,
        monitor: Monitor,
        checkpointer: Checkpointer,
        *,
        max_steps: int,
        ckpt: CheckpointConfig | None,
        validation_interval: int | None,
        extras: Extras | None = None,
    ) -> None:
        self._learner = learner
        self._run = run
        self._feed = feed
        self._monitor = monitor
        self._checkpointer = checkpointer
        self._max_steps = max_steps
        self._ckpt = ckpt
        self._validation_interval = validation_interval
        self._extras = extras
        self._use = DeviceUse(learner)

    def run(self, signals: Sequence[str]) -> Path:
        """Returns the folder of the final weights. Collective; ends early once any rank has a signal in `signals`.

        Raises StepError, and DataError for data that cannot be used, with the weights of the last step saved, if any.
        """
        begun = self._run.step_done
        unusable: DataError | None = None
        try:
            self._train(signals)
        except DataError as error:
            if self._run.step_done == begun:
                raise
            unusable = error
        if self._ckpt is not None and not self._ckpt.weights_only:
            self._checkpointer.save()
            self._checkpointer.prune(self._ckpt)
        folder = self._checkpointer.save(weights_only=True)
        if self._learner.parallel.plan.leads:
            folder.with_name(FINAL).symlink_to(folder.name, target_is_directory=True)
        if unusable is not None:
            raise DataError(f"{unusable}; the weights after step {self._run.step_done} are in {folder}")
        return folder

    def _train(self, signals: Sequence[str]) -> None:
        save_s = 0.0
        while self._run.step_done < self._max_steps and not self._learner.parallel.any(bool(signals)):
            started = time.perf_counter()
            self._checkpointer.check()
            rows, batch = self._feed.next_step()
            data_s = time.perf_counter() - started
            result = self._learner.step(self._run, rows)
            step_s = time.perf_counter() - started
            validated: dict[str, float] = {}
            interval = self._validation_interval
            if interval is not None and (result.step % interval == 0 or result.step == self._max_steps):
                record = self._learner.evaluate(self._run, self._feed.validation())  # every rank takes part
                validated["val/loss"] = -mean(record.logprobs)
            if batch is not None:  # on rank 0, which has the tokens of all ranks
                metrics = self._metrics(batch, result, step_s)
                metrics |= validated | {"time/load_data": data_s, "time/save_ckpt": save_s}
                self._monitor.log(result.step, CATALOGUE.record(Source.SFT, metrics))
                if self._extras is not None:
                    self._extras.log(self._monitor, batch, result)
            save_s = 0.0
            if self._ckpt is not None and self._ckpt.interval and result.step % self._ckpt.interval == 0:
                began = time.perf_counter()
                self._checkpointer.save_as(self._ckpt)
                save_s = time.perf_counter() - began
        if self._run.step_done < self._max_steps:
            why = signals[0] if signals else "another rank got a signal"
            logger.info("{}: training ends after step {} of {}", why, self._run.step_done, self._max_steps)

    def _metrics(self, batch: SFTBatch, result: StepResult, step_s: float) -> dict[str, float]:
        progress = self._checkpointer.progress
        progress.samples += batch.samples
        progress.tokens += batch.tokens
        progress.data = batch.progress.to_json()
        return {
            **common_metrics(result),
            **self._use.metrics(batch.packing.micro_batches, tokens=batch.tokens, seconds=step_s),
            **batch.progress.ratios(),
            "entropy/all/mean": mean(result.tokens.entropies),
            "progress/epoch": batch.epoch,
            "progress/num_samples": float(progress.samples),
            "progress/num_tokens": float(progress.tokens),
            "time/step": step_s,
            "time/forward_backward": result.forward_backward_s,
        }
