"""Ends the steps that the trainer is done with, in order: their version reaches the engines, their record is written.

waits for  the trainer's next step, the weight hub, and the evaluation where the run is synchronous
unblocks   sampling, which a new version admits; the uploader, through room at the trainer
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from meshrl.core.clock import Clock
from meshrl.core.config.shared import LogExtrasConfig
from meshrl.core.metrics.catalogue import Source
from meshrl.core.metrics.names import CATALOGUE
from meshrl.core.telemetry.monitor import Monitor
from meshrl.orchestrator.dispatch import Dispatcher
from meshrl.orchestrator.evals import Evaluator
from meshrl.orchestrator.peers.batch_uploader import BatchUploader
from meshrl.orchestrator.peers.version_relay import VersionRelay
from meshrl.orchestrator.reports import step_record as record
from meshrl.orchestrator.reports.alerts import Alerts
from meshrl.orchestrator.reports.logprob_check import LogprobCheck
from meshrl.orchestrator.reports.rollout_samples import RolloutSamplesWriter
from meshrl.orchestrator.reports.sample_tables import log_extras
from meshrl.orchestrator.run import Run
from meshrl.orchestrator.work.batches import SubmittedStep
from meshrl.wire.types import StepEvent


class StepFinisher:
    """Rows have `seq_len` tokens, `mixture` are the configured shares of the environments. `keep_records` is for the
    table of a benchmark; other runs may be long."""

    def __init__(
        self,
        run: Run,
        *,
        uploader: BatchUploader,
        relay: VersionRelay,
        dispatcher: Dispatcher,
        evaluator: Evaluator,
        logprobs: LogprobCheck,
        alerts: Alerts,
        samples: RolloutSamplesWriter | None,
        log_extras: LogExtrasConfig | None,
        seq_len: int,
        mixture: Mapping[str, float],
        monitor: Monitor,
        clock: Clock,
        keep_records: bool = False,
    ) -> None:
        self.busy = False
        self.records: list[record.Metrics] = []
        self._run = run
        self._uploader = uploader
        self._relay = relay
        self._dispatcher = dispatcher
        self._evaluator = evaluator
        self._logprobs = logprobs
        self._alerts = alerts
        self._samples = samples
        self._log_extras = log_extras
        self._seq_len = seq_len
        self._mixture = mixture
        self._monitor = monitor
        self._clock = clock
        self._keep_records = keep_records
        self._step_began_s = clock.now()

    def request_logprobs(self, step: SubmittedStep) -> SubmittedStep:
        return step if self._samples is None else self._samples.request_logprobs(step)

    async def finish_steps(self, tasks: asyncio.TaskGroup) -> None:
        """Ends steps until the last one; evaluations beside training run in `tasks`."""
        self._step_began_s = self._clock.now()
        await self._evaluator.go_on(tasks)
        while (ended := await self._uploader.next()) is not None:
            step, done = ended
            self.busy = True
            await self._finish(step, done, tasks)
            self.busy = False
            self._run.changed.beat()

    async def _finish(self, step: int, done: StepEvent, tasks: asyncio.TaskGroup) -> None:
        run = self._run
        run.journal.trained(step)
        submitted = await run.take_step(step)
        self._logprobs.check(done, record.staleness_metrics(submitted.groups, step=step, law=run.plan.law))
        version = step if done.version is None else done.version
        served: record.Metrics = {}
        activation = None
        if version > run.plan.active_version:  # else engines have moved on: it was done before this process began
            try:
                with run.stage("version", version, step=step):
                    activation = await self._relay.activate(version, self._uploader.watcher, done.artifact_id)
            except asyncio.CancelledError:  # the run is stopped: the step is trained, and its record says so
                await self._write(submitted, served, done)
                raise
            served = record.activation_metrics(activation, skipped=version < self._uploader.watcher.step)
        active = activation is not None and step <= run.steps.trained  # else it is made and activated again
        if active:
            served["policy/active_version"] = float(version)
            if not run.plan.law.synchronous:
                self._admit(version)
        if run.journal.redone(step):
            served["progress/redone"] = 1.0
        await self._write(submitted, served, done)
        await run.journal.state_checkpoint()
        await self._evaluator.after_step(step, version if active else run.plan.active_version, tasks)
        if active and run.plan.law.synchronous:  # sampling goes on only now, after the evaluation
            self._admit(version)

    def _admit(self, version: int) -> None:
        self._run.plan.activated(version)
        self._dispatcher.dispatch()

    async def _write(self, submitted: SubmittedStep, served: record.Metrics, done: StepEvent) -> None:
        run, now_s = self._run, self._clock.now()
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
