"""The loop of a run: groups of rollouts become batches, batches become versions, versions reach the engines.

    dispatch   starts a sampling task for every group that the staleness law admits, whenever that may have changed
    gather     waits until a step has enough ready groups; unblocked by the sampling tasks
    submit     turns them into a batch and puts it on disk; waits while two batches are at the trainer already
    upload     brings what is on disk to the trainer, in order, and again after a restart of the trainer
    dissolve   undoes a batch that the trainer refused, and those after it; their rollouts are gathered again
    finish     waits until the trainer is done with a step, activates its version, writes its record; unblocks dispatch

`gather`, `submit` and `dissolve` are here; the others are tasks beside them (`dispatch`, `peers.batch_uploader`,
`finish`), so generation goes on while the trainer trains, as far as the law allows. With max_async_level = 0 the plan
admits nothing until the version before is active.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

from loguru import logger

from meshrl.orchestrator.dispatch import Dispatcher
from meshrl.orchestrator.evals import Evaluator
from meshrl.orchestrator.finish import StepFinisher
from meshrl.orchestrator.peers.batch_uploader import BatchRefusal, BatchUploader
from meshrl.orchestrator.peers.version_relay import VersionRelay
from meshrl.orchestrator.run import Run
from meshrl.orchestrator.work.batches import BatchMaker, SubmittedStep, split_groups
from meshrl.orchestrator.work.screening import DropReason
from meshrl.sampling.groups import RolloutGroup
from meshrl.sampling.retry import RunError, first_cause

BATCHES_AT_TRAINER = 2
"""One that trains and one that waits: the next step starts at once, and no batch ages longer."""


class RunLoop:
    """Brings one run to its last step. A step waits for its groups for `batch_s`."""

    def __init__(
        self,
        run: Run,
        *,
        batches: BatchMaker,
        dispatcher: Dispatcher,
        uploader: BatchUploader,
        relay: VersionRelay,
        finisher: StepFinisher,
        evaluator: Evaluator,
        batch_s: float,
        sleep_engines: bool,
    ) -> None:
        self.run = run
        self.relay = relay
        self.finisher = finisher
        self._batches = batches
        self._evaluator = evaluator
        self._dispatcher = dispatcher
        self._uploader = uploader
        self._batch_s = batch_s
        self._sleep_engines = sleep_engines

    async def train(self) -> None:
        """Until the last step's version is active. Raises RunError when the run cannot go on."""
        run, first = self.run, self.run.info.version
        try:
            with run.stage("engines"):
                await self.relay.wait_for_engines()
            with run.stage("version", first):
                await self.relay.activate_first(first)
            await self._batches.begin(run.journal.algorithms(run.steps.recorded))
            await self._evaluator.before_training(first)
            await self._train_steps()
            await self._evaluator.after_training(run.plan.next_step - 1)
        except BaseExceptionGroup as failures:  # tasks fail together; the first cause is what a person needs
            raise first_cause(failures) from failures
        finally:
            run.traces.close()
            await self._batches.close()

    async def _train_steps(self) -> None:
        run, uploader = self.run, self._uploader
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(work) for work in (uploader.watcher.follow(), uploader.upload())]
            finishing = tasks.create_task(self.finisher.finish_steps(tasks))
            self._dispatcher.start(tasks)
            while True:
                with run.stage("trainer"):  # no deadline here: the finisher has those of each step
                    await uploader.wait_for_room(1 if run.plan.exhausted else BATCHES_AT_TRAINER)
                if uploader.refused is not None:
                    await self._dissolve(uploader.refused)
                    continue
                if run.plan.exhausted:
                    break
                step = run.plan.next_step
                with run.stage("groups"):
                    groups = await self._gather()
                if groups is None:
                    continue
                if self._sleep_engines and not (run.plan.in_flight or self._evaluator.busy):
                    with run.counted("time/sleep_engines"):
                        await self.relay.sleep_engines()  # the trainer gets their memory
                await self._submit(step, groups)
            uploader.end()
            await finishing
            await run.journal.state_checkpoint(last_step=run.steps.recorded)
            for task in beside:
                task.cancel()

    # --- gather -----------------------------------------------------------------------------------

    async def _gather(self) -> list[RolloutGroup] | None:
        run = self.run
        most_s = run.tally.seconds["time/wait_for_rollouts"] + self._batch_s  # beyond dissolved batches
        while self._uploader.refused is None:
            run.drop(run.plan.drop_stale())
            if (groups := run.plan.take()) is not None:
                self._dispatcher.dispatch()
                return groups
            self._dispatcher.cancel_stale()
            self._dispatcher.dispatch()
            await self._wait_for_change(most_s - run.tally.seconds["time/wait_for_rollouts"])
        return None

    async def _wait_for_change(self, left_s: float) -> None:
        run, plan = self.run, self.run.plan
        idle = plan.in_flight == 0
        if idle and not self.finisher.busy and run.steps.trained >= run.steps.recorded:
            raise RunError(
                f"step {plan.next_step} needs version {plan.law.required_version(plan.next_step)} on the"
                f" engines (max_async_level = {plan.law.max_async_level}), but they serve version"
                f" {plan.active_version} and no newer one could be activated; see the log of the weight hub at"
                f" {run.services.weights}"
            )
        try:
            with (
                run.counted("time/wait_for_ckpt" if idle else "time/wait_for_rollouts"),
                nullcontext() if idle else run.slots.waiting(),
            ):
                async with asyncio.timeout(None if idle else left_s):  # while idle, the finisher has the deadline
                    await run.changed.next()
        except TimeoutError:
            raise RunError(
                f"rollout service at {' and '.join(run.services.rollout)} did not finish enough groups for"
                f" step {plan.next_step} within {self._batch_s:g} s;"
                " raise orchestrator.deadlines.batch_s if they need longer"
            ) from None

    # --- submit -----------------------------------------------------------------------------------

    async def _submit(self, step: int, groups: list[RolloutGroup]) -> None:
        run, tally = self.run, self.run.take_tally()
        with run.traces.batch(step) as span:
            kept = [group.kept for group in groups]
            assembled = await self._batches.make(step, kept, traceparent=run.traces.traceparent(step))
            rows = assembled.batch.micro_batches
            span.set_attributes({"rl.batch.groups": len(groups), "rl.batch.micro_batches": len(rows)})
        for _ in assembled.untrainable:
            tally.drop(DropReason.UNTRAINABLE)
        submitted = SubmittedStep(step=step, groups=tuple(groups), assembled=assembled, tally=tally)
        submitted = await asyncio.to_thread(self.finisher.reporter.request_logprobs, submitted)
        await run.journal.batch(groups, submitted.assembled, drawn=run.plan.schedule.drawn())
        run.add_step(submitted)
        self._uploader.add(step)

    # --- dissolve ---------------------------------------------------------------------------------

    async def _dissolve(self, refusal: BatchRefusal) -> None:
        run = self.run
        taken = [await run.take_step(step) for step in range(refusal.step, run.steps.recorded + 1)]
        bad = self._batches.at_fault(refusal.error, taken[0])
        if not bad:
            raise self._uploader.refusal_error(refusal) from refusal.error
        rest: list[RolloutGroup] = []
        for submitted in taken:
            run.journal.release(submitted.step, damaged=submitted.lost)
            run.tally.take_back(submitted.tally)
            for group, lost in split_groups(submitted, bad):
                run.drop((rollout, DropReason.REFUSED) for rollout in lost)
                rest.append(group)
        for group, screened in zip(rest, run.plan.take_back(refusal.step, rest), strict=True):
            run.count(group, screened)
        logger.warning(
            f"batch {refusal.step} is made anew without {len(bad)} rollouts ({min(bad)} ...): {refusal.error}"
        )
        self._batches.restore(run.journal.algorithms(refusal.step - 1))
        self._uploader.withdraw(refusal.step)
        self._dispatcher.dispatch()
