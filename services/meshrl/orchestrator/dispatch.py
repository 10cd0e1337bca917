"""Starts the sampling of groups, as many as the staleness law admits, and judges each group that comes back.

waits for  the rollout services; one task a group, so that groups finish in any order
unblocks   the loop, which waits for ready groups
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from loguru import logger
from opentelemetry import trace

from meshrl.algorithms.recipes.base import sampled_tokens
from meshrl.client.backoff import Backoff
from meshrl.core.clock import Clock
from meshrl.core.config.schema import flag
from meshrl.core.metrics.statistics import MovingMean
from meshrl.orchestrator.run import Run
from meshrl.orchestrator.teachers.scorer import RolloutScorer
from meshrl.orchestrator.work.screening import DropReason
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef
from meshrl.sampling.retry import AWAY, RunError
from meshrl.sampling.sampler import Problems, RolloutSampler
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.trainable import rollout_problems
from meshrl.wire.types import Rollout, RolloutEvent, Sampling, TrainerInfo

_AWAY = frozenset(reason.name for reason in (Reason.ENGINE_FAILED, *AWAY))
"""Failures of groups while an engine or the rollout service restarts."""

WAIT_S = (0.02, 2.0)
"""After the first lost group, and at most."""

REMEMBERED_TASKS = 65_536
REMEMBERED_GROUPS = 32
"""In the mean of an environment."""


class Dispatcher:
    def __init__(
        self,
        run: Run,
        trainer: TrainerInfo,
        sampler: RolloutSampler,
        *,
        taught: Mapping[str, RolloutSampler],
        sampling: Mapping[str, Sampling],
        scorer: RolloutScorer,
        lost: LossLimit,
        longest_first: bool,
    ) -> None:
        """`taught` samples the environments that a teacher plays, `sampler` the others; `sampling` is by environment.
        `longest_first` is off for a run that is to be repeated: known lengths depend on what came back in time."""
        self._run = run
        self._trainer = trainer
        self._sampler = sampler
        self._taught = taught
        self._sampling = sampling
        self._cancelled: set[str] = set()
        """In flight; they would come back too old."""
        self._scorer = scorer
        self._lost = lost
        self._lengths = LengthEstimates() if longest_first else None
        self._tasks: asyncio.TaskGroup

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Sampling runs as tasks of this group, which fails with the first RunError of one."""
        self._tasks = tasks
        self.dispatch()

    def dispatch(self) -> None:
        """Starts every group that the law admits."""
        run, begun = self._run, []
        while (ticket := run.plan.dispatch(f"group-{uuid.uuid4()}")) is not None:
            run.journal.dispatch(ticket)
            begun.append(ticket)
        for ticket in begun if self._lengths is None else self._lengths.longest_first(begun):
            self._tasks.create_task(self._sample(ticket))
        run.slots.note()
        run.changed.beat()

    def cancel_stale(self) -> None:
        """Stops groups in flight that would be too old for the next step."""
        plan = self._run.plan
        if too_old := [group_id for group_id in plan.stale_in_flight() if group_id not in self._cancelled]:
            self._cancelled.update(too_old)
            self._tasks.create_task(self._cancel(too_old, step=plan.next_step))

    async def _cancel(self, group_ids: list[str], *, step: int) -> None:
        try:
            cancelled = await self._sampler.pool.cancel(group_ids)
        except MeshError as error:  # not needed for correctness: they come back stale and are dropped
            logger.warning(f"could not cancel {len(group_ids)} groups that are too old: {error}")
        else:
            logger.info(f"cancelled {cancelled} rollouts in flight that would be too old for step {step}")

    async def _sample(self, ticket: GroupTicket) -> None:
        run = self._run

        def on_event(event: RolloutEvent) -> None:
            run.journal.record_event(ticket, event)
            run.slots.note()

        with trace.use_span(run.traces.span(ticket.for_step)):
            teacher = self._taught.get(ticket.task.environment)
            group = await (teacher or self._sampler).sample(
                replace(ticket, min_version=0) if teacher else ticket,  # a teacher has no versions
                sampling=self._sampling[ticket.task.environment],
                traceparent=run.traces.traceparent(ticket.for_step),
                problems_of=self._problems_of,
                on_event=on_event,
                is_wanted=lambda: ticket.group_id not in self._cancelled,
            )
        if self._lengths is not None:
            self._lengths.observe(group)
        too_old = ticket.group_id in self._cancelled
        run.journal.close_group(group, cancelled_for=DropReason.STALE.value if too_old else "rollout_service")
        run.slots.note()
        await self._lost.judge(group)
        usable = [one for one in group.rollouts if math.isfinite(one.reward)]
        await self._scorer.score([usable])  # the step finds it done
        screened = run.plan.finish(group)
        self._cancelled.discard(ticket.group_id)
        run.count(group, screened)
        if run.plan.zero_signal_in_a_row >= run.plan.limits.max_zero_signal_groups:
            raise RunError(
                f"{run.plan.zero_signal_in_a_row} groups in a row had equal rewards, last in"
                f" {ticket.task.environment!r}: there is nothing to learn; make the task easier or harder, raise"
                " orchestrator.group_size or orchestrator.sampling.temperature, or set"
                f" {flag('filters.zero_signal', off=True)}"
            )
        self.dispatch()

    def _problems_of(self, rollout: Rollout) -> Problems:
        if self._run.journal.ledger.is_open(rollout.rollout_id):
            return [("rollout_id", f"must be a UUID of its own, got that of another, {rollout.rollout_id!r}")]
        if rollout.oldest_version is None and rollout.environment not in self._taught:
            unsaid = [place for place, sample in enumerate(rollout.samples) if sample.loss_mask.any()]
            if unsaid:
                return [(f"samples[{unsaid[0]}].version_spans", "must say which version of the policy sampled what")]
        return rollout_problems(
            rollout,
            vocab_size=self._trainer.vocab_size or None,
            newest_version=self._run.steps.recorded,
            routed=self._trainer.router_replay,
        )


class LengthEstimates:
    """Expected lengths in sampled tokens: of a task, that of its last group; of one not seen yet, its environment's.

    Groups that begin together go to the services longest first, because a batch waits for its last rollouts.
    """

    def __init__(self) -> None:
        self._of_task: OrderedDict[TaskRef, float] = OrderedDict()
        self._of_environment: defaultdict[str, MovingMean] = defaultdict(partial(MovingMean, REMEMBERED_GROUPS))

    def observe(self, group: RolloutGroup) -> None:
        if not group.rollouts:
            return
        task, length = group.ticket.task, float(max(map(sampled_tokens, group.rollouts)))
        self._of_task[task] = length
        self._of_task.move_to_end(task)
        if len(self._of_task) > REMEMBERED_TASKS:
            self._of_task.popitem(last=False)
        self._of_environment[task.environment].add(length)

    def expected(self, task: TaskRef) -> float:
        """Of the longest rollout of the task's next group; 0 if unknown."""
        known = self._of_task.get(task)
        return self._of_environment[task.environment].value or 0.0 if known is None else known

    def longest_first(self, tickets: Iterable[GroupTicket]) -> list[GroupTicket]:
        """By the step that they are for, within it the longest first, else as they came."""
        return sorted(tickets, key=lambda ticket: (ticket.for_step, -self.expected(ticket.task)))


class LossLimit:
    """Counts groups in a row that failures left with fewer rollouts than their algorithm needs."""

    def __init__(
        self,
        least_rollouts: Mapping[str, int],
        *,
        most_in_a_row: int,
        unreachable_s: float,
        services: Sequence[str],
        clock: Clock,
    ) -> None:
        """`least_rollouts` is by environment; `services` are addresses, for the error."""
        self._least = least_rollouts
        self._most = most_in_a_row
        self._unreachable_s = unreachable_s
        self._services = services
        self._clock = clock
        self._backoff = Backoff(*WAIT_S, jitter=0.0)
        self._in_a_row = 0
        self._since_s = 0.0

    async def judge(self, group: RolloutGroup) -> None:
        """Waits after a lost group, longer each time in a row. Raises RunError after too many; while an engine or the
        service is away, only after `unreachable_s`."""
        if len(group.rollouts) >= self._least[group.ticket.task.environment] or not group.errors:
            self._in_a_row = 0
            self._backoff.reset()
            return
        if not self._in_a_row:
            self._since_s = self._clock.now()
        self._in_a_row += 1
        last = group.failures[-1] if group.failures else None
        why = f"{last.reason}: {last.message}" if last else group.cut_short
        away = (last.reason if last else group.cut_short) in _AWAY
        may_come_back = away and self._clock.now() - self._since_s < self._unreachable_s
        if self._in_a_row >= self._most and not may_come_back:
            raise RunError(
                f"{self._in_a_row} groups in a row were lost to failures, last in"
                f" {group.ticket.task.environment!r} with {why}; see the log of the rollout service at"
                f" {' or '.join(self._services)}"
            )
        logger.warning(f"group {group.ticket.group_id} of {group.ticket.task.environment} is lost: {why}")
        await self._clock.sleep(self._backoff.next_s())
