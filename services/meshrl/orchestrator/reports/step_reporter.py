"""Writes what is known of a step once it has ended: its record of metrics, alerts, samples of rollouts, tables."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from meshrl.core.config.shared import LogExtrasConfig
from meshrl.core.metrics.catalogue import Source
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.telemetry.monitor import Monitor
from meshrl.orchestrator.reports import step_record as record
from meshrl.orchestrator.reports.alerts import Alerts
from meshrl.orchestrator.reports.rollout_samples import RolloutSamplesWriter
from meshrl.orchestrator.reports.sample_tables import log_extras
from meshrl.orchestrator.run import Run
from meshrl.orchestrator.work.batches import SubmittedStep
from meshrl.wire.types import StepEvent


class StepReporter:
    """Rows have `seq_len` tokens, `mixture` are the configured shares of the environments. `keep_records` is for the
    table of a benchmark; other runs may be long."""

    def __init__(
        self,
        run: Run,
        monitor: Monitor,
        *,
        alerts: Alerts,
        samples: RolloutSamplesWriter | None,
        log_extras: LogExtrasConfig | None,
        seq_len: int,
        mixture: Mapping[str, float],
        keep_records: bool,
    ) -> None:
        self.records: list[record.Metrics] = []
        self._run = run
        self._monitor = monitor
        self._alerts = alerts
        self._samples = samples
        self._log_extras = log_extras
        self._seq_len = seq_len
        self._mixture = mixture
        self._keep_records = keep_records
        self._step_began_s = run.clock.now()

    def begin(self) -> None:
        """The first step begins now."""
        self._step_began_s = self._run.clock.now()

    def request_logprobs(self, step: SubmittedStep) -> SubmittedStep:
        return step if self._samples is None else self._samples.request_logprobs(step)

    async def write(self, submitted: SubmittedStep, served: record.Metrics, done: StepEvent) -> None:
        """`served` are the metrics of the step's version at the engines. The next step begins now."""
        run, now_s = self._run, self._run.clock.now()
        seconds, self._step_began_s = now_s - self._step_began_s, now_s
        progress = run.journal.progress(submitted.step)
        metrics = record.step_metrics(submitted, progress, law=run.plan.law, seq_len=self._seq_len, seconds=seconds)
        metrics |= record.mixture_metrics(submitted.assembled, submitted.groups, self._mixture)
        metrics |= {"policy/active_version": float(run.plan.active_version)} | served
        metrics |= {f"progress/epoch/{name}": value for name, value in run.plan.schedule.epochs().items()}
        metrics = record.merged(CATALOGUE.record(Source.ORCHESTRATOR, metrics), trainer=record.trainer_metrics(done))
        lasting, begun = self._alerts.check(submitted.step, metrics, run.waits.lags_s)
        metrics |= CATALOGUE.record(Source.ORCHESTRATOR, lasting)
        run.traces.end(submitted.step, {"rl.rollouts": metrics["batch/rollouts"], "rl.step.seconds": seconds})
        await asyncio.to_thread(self._monitor.log, submitted.step, metrics)
        if begun:
            await asyncio.to_thread(self._monitor.log_alerts, submitted.step, begun)
        run.journal.logged(submitted.step, forgotten=submitted.step > run.steps.trained)
        if self._samples is not None:
            await asyncio.to_thread(self._samples.write, submitted, done.logprobs)
        await log_extras(self._monitor, self._log_extras, submitted, done)
        if self._keep_records:
            self.records.append(metrics)
