"""The work of `eval`: loads each set of weights, plays missing rollouts, scores all."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from pathlib import Path

from loguru import logger

from meshrl.core.metrics.catalogue import Source
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.telemetry.monitor import Monitor
from meshrl.eval.checkpoints import EvaluatedWeights
from meshrl.eval.report import EvaluationPoint, record, table, write_report
from meshrl.eval.scores import score
from meshrl.sampling.groups import RolloutGroup
from meshrl.sampling.retry import RunError
from meshrl.trials.plan import Trial
from meshrl.trials.play import TrialRun
from meshrl.wire.values import JsonObject


class Evaluation:
    """With `loads` the engines load each set; else the served weights are evaluated."""

    def __init__(
        self,
        weights: list[EvaluatedWeights],
        monitor: Monitor,
        *,
        loads: bool,
        pass_threshold: float,
        bootstrap_samples: int,
    ) -> None:
        self._weights = weights
        self._monitor = monitor
        self._loads = loads
        self._pass_threshold = pass_threshold
        self._bootstrap_samples = bootstrap_samples
        self._points: list[EvaluationPoint] = []

    async def run(self, run: TrialRun) -> int:
        """Returns the exit code: 0 even if rollouts failed; the table lists them. Raises RunError."""
        if self._loads and run.facts.api != "generate":
            raise RunError(
                f"the server at {run.facts.urls[0]} does not load checkpoints; start an engine of ours with the base"
                " model (`inference --model.name MODEL`), or add --inference to have one started"
            )
        for weights in self._weights:
            await self._one(run, weights)
            point = self._point(run, weights)
            self._points.append(point)
            await asyncio.to_thread(self._log, point, run.results.folder)
        sys.stdout.write(f"\n{table(self._points)}\n\n")
        logger.info("results are in {}", run.results.folder)
        return 0

    async def _one(self, run: TrialRun, weights: EvaluatedWeights) -> None:
        if not run.left(weights.name):
            logger.info("{}: every rollout is there", weights.name)
            return
        if self._loads:
            what = "the base model" if weights.folder is None else str(weights.folder)
            await run.endpoints.load(weights.folder, weights.step, what=what)

        def on_end(trial: Trial, group: RolloutGroup) -> None:
            run.results.record(weights.name, trial, group)

        await run.play(weights.name, run.endpoints.version, on_end)

    def _point(self, run: TrialRun, weights: EvaluatedWeights) -> EvaluationPoint:
        rows: dict[str, list[JsonObject]] = defaultdict(list)
        for row in run.results.rows:
            if row["checkpoint"] == weights.name:
                rows[row["environment"]].append(row)
        scores = [
            score(
                span.environment,
                [row for row in rows[span.environment] if row["task"] < span.tasks],
                asked=span.rollouts,
                group_size=span.group_size,
                pass_threshold=self._pass_threshold,
                resamplings=self._bootstrap_samples,
            )
            for span in run.spans
        ]
        return EvaluationPoint(weights=weights, scores=scores)

    def _log(self, point: EvaluationPoint, folder: Path) -> None:
        values = record(point)
        step = int(values.pop("step"))
        self._monitor.log(step, CATALOGUE.record(Source.EVAL, values))
        write_report(folder, self._points)
