"""The loop: groups of rollouts become batches, batches become versions, versions reach the engines.

    gather     consumes finished groups, waits until a step has enough; unblocked by the sampling tasks
    record     turns them into a batch and puts it on disk; waits while two batches are at the trainer already
    feed       uploads what is on disk, in order, again after a restart of the trainer
    dissolve   takes a batch that the trainer refuses apart, with those behind it; their rollouts are gathered again
    finish     waits until the trainer is done with a step, activates its version, writes its record; unblocks sampling
    dispatch   starts a sampling task for every group that the law admits; called whenever that may have changed

Sampling and finishing run beside gathering, so generation goes on while the trainer trains as far as the law allows;
with max_async_level = 0 the plan admits nothing until the version before is active, and the same loop is synchronous.
What a restarted orchestrator or trainer finds is in the journal: see `recovery`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable

from loguru import logger
from opentelemetry import trace

from meshrl.core.config.flags import flag
from meshrl.core.telemetry.monitor import Monitor
from meshrl.orchestrator.build import make_evaluator, make_logprob_check, make_plan, sampling_by_environment
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.orchestrator.evals import Evaluator
from meshrl.orchestrator.ledger.journal import Journal
from meshrl.orchestrator.ledger.submitted_steps import SubmittedSteps
from meshrl.orchestrator.peers.batch_uploader import BatchUploader
from meshrl.orchestrator.peers.connect import Mesh, Services
from meshrl.orchestrator.peers.stale_groups import StaleGroups
from meshrl.orchestrator.peers.version_relay import VersionRelay
from meshrl.orchestrator.reports import step_record as record
from meshrl.orchestrator.reports.sample_tables import log_extras
from meshrl.orchestrator.reports.step_traces import StepTraces
from meshrl.orchestrator.work.advantage import build_advantage
from meshrl.orchestrator.work.batches import SubmittedStep, assemble
from meshrl.orchestrator.work.lost_groups import LostGroups
from meshrl.orchestrator.work.refused_batches import BatchRefusal, at_fault, without
from meshrl.orchestrator.work.screening import DropReason, ReadyGroup, Screened
from meshrl.orchestrator.work.tally import StepTally
from meshrl.sampling.groups import GroupTicket, RolloutGroup
from meshrl.sampling.retry import RunError, first_cause
from meshrl.sampling.sampler import GroupSampler, Problems, SamplerDeadlines
from meshrl.wire.trainable import rollout_problems
from meshrl.wire.types import Rollout, StepEvent

BATCHES_AT_TRAINER = 2
"""One that trains and one that waits: the trainer starts the next step at once, and no batch ages longer than that."""


class RunLoop:
    """One run from the trainer's current step to the last one."""

    def __init__(
        self,
        config: OrchestratorConfig,
        services: Services,
        mesh: Mesh,
        *,
        journal: Journal,
        monitor: Monitor,
        tracer: trace.Tracer,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.config = config
        self.plan = make_plan(config, mesh)
        self.records: list[record.Metrics] = []
        """Of every step, for the table of a benchmark; empty in other runs, which may be long."""
        self._services = services
        self._mesh = mesh
        self._journal = journal
        self._monitor = monitor
        self._clock = clock
        self._sleep = sleep
        self._spans = StepTraces(tracer)
        self._sampler = GroupSampler(
            services.rollout,
            address=config.services.rollout,
            deadlines=SamplerDeadlines(
                group_s=config.deadlines.group_s,
                retry_s=config.deadlines.retry_s,
                unreachable_s=config.deadlines.unreachable_s,
            ),
            engine_pool=config.engine_pool,
            clock=clock,
            sleep=sleep,
        )
        self._sampling = sampling_by_environment(config)
        self._advantage = build_advantage(config.advantage)
        self._relay = VersionRelay(services.weights, config=config, run_id=mesh.run.run_id, clock=clock, sleep=sleep)
        self._evaluator: Evaluator | None = make_evaluator(config, mesh, self._sampler, clock)
        self._logprobs = make_logprob_check(config)
        self._tally = StepTally()
        self._changed = asyncio.Event()
        self._submitted = SubmittedSteps(journal)
        self._finishing = False
        self._evaluating = False
        self._doomed = StaleGroups(self.plan, services.rollout)
        self._lost_groups = LostGroups(config, clock=clock, sleep=sleep)
        self._go_on()
        self._feed = BatchUploader(
            services.trainer,
            config=config,
            run=mesh.run,
            recorded=journal.starting_point.recorded,
            trained=journal.starting_point.unlogged_from - 1,
            batch_of=self._submitted.batch,
            span_of=self._spans.span,
            on_back=self._go_back,
            on_durable=journal.durable,
            on_refused=self._changed.set,
            clock=clock,
            sleep=sleep,
        )
        self._step_began_s = clock()
        self._tasks: asyncio.TaskGroup

    def _go_on(self) -> None:
        """Takes up what an earlier process left."""
        start = self._journal.starting_point
        self.plan.next_step = start.recorded + 1
        self.plan.go_on(drawn=start.drawn, next_sequence=start.next_sequence, again=start.redispatch)
        for group in start.ready:
            self._drop(self.plan.readmit(group))

    async def run(self) -> None:
        """Until the last step's version is active. Raises RunError when the run cannot go on."""
        try:
            await self._relay.wait_for_engines()
            await self._relay.activate_first(self._mesh.run.version)
            if self.config.eval is not None and self.config.eval.eval_base and self._mesh.run.version == 0:
                await self._evaluate(step=0)
            await self._train()
            last, final = self.plan.next_step - 1, self.config.eval is not None and self.config.eval.eval_final
            if final and self._evaluator is not None and last > 0 and not self._evaluator.due(last):
                await self._evaluate(last)
        except BaseExceptionGroup as failures:  # tasks fail together; the first cause is what a person needs
            raise first_cause(failures) from failures
        finally:
            self._spans.close()

    async def _train(self) -> None:
        self._step_began_s = self._clock()
        async with asyncio.TaskGroup() as self._tasks:
            beside = [self._tasks.create_task(work) for work in (self._feed.follow(), self._feed.upload())]
            finishing = self._tasks.create_task(self._finish_steps())
            self._dispatch()
            while True:
                await self._wait_for_trainer_place(1 if self.plan.exhausted else BATCHES_AT_TRAINER)
                if self._feed.refused is not None:
                    await self._dissolve(self._feed.refused)
                    continue
                if self.plan.exhausted:
                    break
                step = self.plan.next_step
                if (groups := await self._gather()) is None:
                    continue
                if self.config.sleep_engines and not (self.plan.in_flight or self._evaluating):
                    self._tally.sleep_engines_s = await self._relay.sleep_engines()  # the trainer gets their memory
                await self._submit(step, groups)
            self._feed.end()
            await finishing
            await self._journal.state_checkpoint(last_step=self._feed.recorded)
            for task in beside:
                task.cancel()

    # --- sampling -----------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Starts what the law admits now."""
        while (ticket := self.plan.dispatch(f"group-{uuid.uuid4()}")) is not None:
            self._journal.dispatch(ticket)
            self._tasks.create_task(self._sample(ticket))
        self._changed.set()

    async def _sample(self, ticket: GroupTicket) -> None:
        """One group from dispatch to verdict."""
        with trace.use_span(self._spans.span(ticket.for_step)):
            group = await self._sampler.sample(
                ticket,
                sampling=self._sampling[ticket.task.environment],
                traceparent=self._spans.traceparent(ticket.for_step),
                problems_of=self._problems_of,
                on_event=lambda event: self._journal.enter(ticket, event),
            )
        too_old = self._doomed.has(ticket.group_id)
        self._journal.close_group(group, cancelled_for=DropReason.STALE.value if too_old else "rollout_service")
        await self._lost_groups.judge(group)
        screened = self.plan.finish(group)
        self._doomed.forget(ticket.group_id)
        self._book(group, screened)
        if self.plan.silent_groups_in_a_row >= self.config.filters.max_zero_signal_groups:
            raise RunError(
                f"{self.plan.silent_groups_in_a_row} groups in a row had equal rewards, last in"
                f" {ticket.task.environment!r}: there is nothing to learn; make the task easier or harder, raise"
                " orchestrator.group_size or orchestrator.sampling.temperature, or set"
                f" {flag('filters.zero_signal', off=True)}"
            )
        self._dispatch()

    def _problems_of(self, rollout: Rollout) -> Problems:
        """What keeps the trainer from taking a rollout; no version is newer than the last step with a batch."""
        if self._journal.is_open(rollout.rollout_id):
            return [("rollout_id", f"must be a UUID of its own, got that of another, {rollout.rollout_id!r}")]
        vocab_size = self._mesh.trainer.vocab_size or None
        return rollout_problems(rollout, vocab_size=vocab_size, newest_version=self._feed.recorded)

    def _book(self, group: RolloutGroup, screened: Screened) -> None:
        """Books what was dropped of a group that was judged."""
        self._drop(screened)
        if not screened.kept:
            self._tally.discarded.append(group)
            self._tally.zero_signal_groups += any(why is DropReason.ZERO_SIGNAL for _, why in screened.dropped)

    def _drop(self, screened: Screened) -> None:
        for rollout, reason in screened.dropped:
            self._journal.drop(rollout.rollout_id, reason)
            self._tally.drop(reason)

    # --- one step -----------------------------------------------------------------------------

    async def _wait_for_trainer_place(self, at_most: int) -> None:
        began_s = self._clock()
        await self._feed.place(at_most)  # bounded by the deadlines of the finishing task
        self._tally.wait_for_ckpt_s += self._clock() - began_s

    async def _gather(self) -> list[ReadyGroup] | None:
        """The groups of the next step; None when an earlier batch was refused. Raises RunError when none come."""
        most_s = self._tally.wait_for_rollouts_s + self.config.deadlines.batch_s  # on top of those of dissolved batches
        while self._feed.refused is None:
            for _, screened in self.plan.drop_stale():
                self._drop(screened)
            if (groups := self.plan.take()) is not None:
                self._dispatch()
                return groups
            if too_old := self._doomed.take():
                self._tasks.create_task(self._doomed.cancel(too_old))
            self._dispatch()
            self._changed.clear()
            await self._wait_for_change(most_s - self._tally.wait_for_rollouts_s)
        return None

    async def _wait_for_change(self, left_s: float) -> None:
        """Waits for a group or a version, and books whether generation or the trainer was waited for."""
        idle = self.plan.in_flight == 0
        if idle and not self._finishing and self._feed.trained >= self._feed.recorded:
            raise RunError(
                f"step {self.plan.next_step} needs version {self.plan.law.required_version(self.plan.next_step)} on the"
                f" engines (max_async_level = {self.config.max_async_level}), but they serve version"
                f" {self.plan.active_version} and no newer one could be activated; see the log of the weight hub at"
                f" {self.config.services.weights}"
            )
        began_s = self._clock()
        try:
            async with asyncio.timeout(None if idle else left_s):  # while idle, the finishing task has the deadline
                await self._changed.wait()
        except TimeoutError:
            raise RunError(
                f"rollout service at {self.config.services.rollout} did not finish enough groups for step"
                f" {self.plan.next_step} within {self.config.deadlines.batch_s:g} s;"
                " raise orchestrator.deadlines.batch_s if they need longer"
            ) from None
        waited_s = self._clock() - began_s
        if idle:
            self._tally.wait_for_ckpt_s += waited_s
        else:
            self._tally.wait_for_rollouts_s += waited_s

    async def _submit(self, step: int, groups: list[ReadyGroup]) -> None:
        """Makes the batch and hands it to the trainer."""
        tally, self._tally = self._tally, StepTally()
        try:
            assembled = await asyncio.to_thread(
                assemble,
                [ready.kept for ready in groups],
                run_id=self._mesh.run.run_id,
                step=step,
                advantage=self._advantage,
                environments=[env.resolved_name for env in self.config.train.env],
                seq_len=self.config.seq_len,
                dp_size=self._mesh.trainer.dp_size,
                traceparent=self._spans.traceparent(step),
            )
        except ValueError as error:  # no rollout fits: a shorter prompt or a longer row is needed
            raise RunError(f"step {step} has nothing to train on: {error}; raise orchestrator.seq_len") from error
        for _ in assembled.untrainable:
            tally.drop(DropReason.UNTRAINABLE)
        await self._journal.batch(groups, assembled, dp_size=self._mesh.trainer.dp_size, drawn=self.plan.drawn())
        self._submitted.add(SubmittedStep(step=step, groups=tuple(groups), assembled=assembled, tally=tally))
        self._feed.add(step)

    async def _dissolve(self, refusal: BatchRefusal) -> None:
        """Drops what the trainer refused a batch for; what else it and those behind it hold is gathered again."""
        taken = [await self._submitted.take(step) for step in range(refusal.step, self._feed.recorded + 1)]
        bad = at_fault(refusal, taken[0], vocab_size=self._mesh.trainer.vocab_size or None)
        if not bad:
            raise self._feed.not_taken(refusal) from refusal.error
        sound: list[ReadyGroup] = []
        for submitted in taken:
            self._journal.release(submitted.step, damaged=submitted.lost)
            self._tally.take_back(submitted.tally)
            for ready, lost in without(submitted, bad):
                self._drop(Screened(kept=(), dropped=tuple((rollout, DropReason.REFUSED) for rollout in lost)))
                sound.append(ready)
        for ready, screened in zip(sound, self.plan.take_back(refusal.step, sound), strict=True):
            self._book(ready.group, screened)
        logger.warning(
            f"batch {refusal.step} is made anew without {len(bad)} rollouts ({min(bad)} ...): {refusal.error}"
        )
        self._feed.withdraw(refusal.step)
        self._dispatch()

    def _go_back(self, step: int, done: int) -> None:
        """The trainer restarted at `step`: those after it, up to `done`, are done again."""
        self._journal.go_back(step, done)
        self.plan.rolled_back(step)

    # --- finishing ----------------------------------------------------------------------------

    async def _finish_steps(self) -> None:
        """Brings each step to its end, in order."""
        while (ended := await self._feed.next()) is not None:
            step, done = ended
            self._finishing = True
            await self._finish(step, done)
            self._finishing = False
            self._changed.set()

    async def _finish(self, step: int, done: StepEvent) -> None:
        self._journal.trained(step)
        submitted = await self._submitted.take(step)
        self._logprobs.look(done, record.staleness_metrics(submitted.groups, step=step, law=self.plan.law))
        version = step if done.version is None else done.version
        synchronous = self.config.max_async_level == 0
        served: record.Metrics = {}
        activation = None
        if version > self.plan.active_version:  # else engines have moved on: it was done before this process began
            try:
                with trace.use_span(self._spans.span(step)):
                    activation = await self._relay.activate_or_skip(self._feed, version)
            except asyncio.CancelledError:  # the run is stopped: the step is trained, and its record says so
                await self._write(submitted, served, trainer=record.trainer_metrics(done))
                raise
            served = record.activation_metrics(activation, skipped=version < self._feed.came_back_at)
        active = activation is not None and step <= self._feed.trained  # else it is made and activated again
        if active:
            served["policy/active_version"] = float(version)
            if not synchronous:
                self._sample_with(version)
        if redone := self._journal.redone(step):
            served["progress/redone"] = 1.0
        await self._write(submitted, served, trainer=record.trainer_metrics(done))
        await self._journal.state_checkpoint()
        if self._evaluator is not None and self._evaluator.due(step) and not redone:
            if synchronous:
                await self._evaluate(step, version=version if active else None)
            else:
                self._tasks.create_task(self._evaluate(step))
        if active and synchronous:  # sampling goes on only now, after the evaluation
            self._sample_with(version)

    def _sample_with(self, version: int) -> None:
        self.plan.activated(version)
        self._dispatch()

    async def _write(self, submitted: SubmittedStep, served: record.Metrics, *, trainer: record.Metrics) -> None:
        """Writes the one record of a step: its own metrics, how the version was `served`, and the `trainer`'s."""
        now_s = self._clock()
        seconds, self._step_began_s = now_s - self._step_began_s, now_s
        metrics = record.step_metrics(
            submitted.groups,
            submitted.assembled,
            submitted.tally,
            self._journal.progress(submitted.step),
            step=submitted.step,
            law=self.plan.law,
            seq_len=self.config.seq_len,
            seconds=seconds,
        )
        metrics |= {"policy/active_version": float(self.plan.active_version)} | served
        metrics |= {f"progress/epoch/{name}": value for name, value in self.plan.epochs().items()}
        metrics = record.merged(metrics, trainer=trainer)
        self._spans.end(submitted.step, {"rl.rollouts": metrics["batch/rollouts"], "rl.step.seconds": seconds})
        await asyncio.to_thread(self._monitor.log, submitted.step, metrics)
        self._journal.logged(submitted.step, forgotten=submitted.step > self._feed.trained)
        if (wandb := self.config.wandb) is not None:
            await log_extras(self._monitor, wandb.log_extras, submitted)
        if self.config.bench:
            self.records.append(metrics)

    # --- evaluation ---------------------------------------------------------------------------

    async def _evaluate(self, step: int, version: int | None = None) -> None:
        """Scores the active version and writes a record of its own under `step`."""
        if self._evaluator is None:
            return
        self._evaluating = True
        scores = await self._evaluator.evaluate(version=self.plan.active_version if version is None else version)
        self._evaluating = False
        await asyncio.to_thread(self._monitor.log, step, scores)
