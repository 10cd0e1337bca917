"""Ends the steps that the trainer is done with, in order: their version reaches the engines, their record is written.

waits for  the trainer's next step, the weight hub, and the evaluation where the run is synchronous
unblocks   sampling, which a new version admits; the uploader, through room at the trainer
"""

from __future__ import annotations

import asyncio

from meshrl.orchestrator.dispatch import Dispatcher
from meshrl.orchestrator.evals import Evaluator
from meshrl.orchestrator.peers.batch_uploader import BatchUploader
from meshrl.orchestrator.peers.version_relay import VersionRelay
from meshrl.orchestrator.reports import step_record as record
from meshrl.orchestrator.reports.logprob_check import LogprobCheck
from meshrl.orchestrator.reports.step_reporter import StepReporter
from meshrl.orchestrator.run import Run
from meshrl.wire.types import StepEvent


class StepFinisher:
    def __init__(
        self,
        run: Run,
        *,
        uploader: BatchUploader,
        relay: VersionRelay,
        dispatcher: Dispatcher,
        evaluator: Evaluator,
        logprobs: LogprobCheck,
        reporter: StepReporter,
    ) -> None:
        self.busy = False
        self.reporter = reporter
        self._run = run
        self._uploader = uploader
        self._relay = relay
        self._dispatcher = dispatcher
        self._evaluator = evaluator
        self._logprobs = logprobs

    async def finish_steps(self, tasks: asyncio.TaskGroup) -> None:
        """Ends steps until the last one; evaluations beside training run in `tasks`."""
        self.reporter.begin()
        await self._evaluator.go_on(tasks)
        while (ended := await self._uploader.next()) is not None:
            step, done = ended
            self.busy = True
            await self._finish(step, done, tasks)
            self.busy = False
            self._run.changed.beat()

    async def _finish(self, step: int, done: StepEvent, tasks: asyncio.TaskGroup) -> None:
        run = self._run
        run.journal.ledger.train(step)
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
                await self.reporter.write(submitted, served, done)
                raise
            served = record.activation_metrics(activation, skipped=version < self._uploader.watcher.step)
        active = activation is not None and step <= run.steps.trained  # else it is made and activated again
        if active:
            served["policy/active_version"] = float(version)
            if not run.plan.law.synchronous:
                self._admit(version)
        if run.journal.redone(step):
            served["progress/redone"] = 1.0
        await self.reporter.write(submitted, served, done)
        await run.journal.state_checkpoint()
        await self._evaluator.after_step(step, version if active else run.plan.active_version, tasks)
        if active and run.plan.law.synchronous:  # sampling goes on only now, after the evaluation
            self._admit(version)

    def _admit(self, version: int) -> None:
        self._run.plan.activated(version)
        self._dispatcher.dispatch()
