"""The state of one run that the loop's parts share: plan, journal, counters, batches, traces, and how far it has come.

A process has one. The dispatcher adds groups to it, the loop makes batches of them, the uploader sends those to the
trainer, and the finisher ends the steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal

from opentelemetry import trace

from meshrl.core.clock import Clock
from meshrl.core.config.shared import ServicesConfig
from meshrl.core.telemetry.tracing import BATCH_SPAN, STEP_SPAN, traceparent_of
from meshrl.core.telemetry.waits import waits_of
from meshrl.orchestrator.ledger.journal import Journal
from meshrl.orchestrator.peers.batch_uploader import StepCursors
from meshrl.orchestrator.teachers.scorer import GroupScorer
from meshrl.orchestrator.work.batches import SubmittedStep
from meshrl.orchestrator.work.plan import WorkPlan
from meshrl.orchestrator.work.recipes import Recipes
from meshrl.orchestrator.work.screening import DropReason, Screened, StepTally
from meshrl.sampling.groups import RolloutGroup
from meshrl.wire.types import Batch, RunInfo


class Run:
    """A run that continues from the journal; `info` is the trainer's description of it when the process began."""

    def __init__(
        self,
        info: RunInfo,
        *,
        plan: WorkPlan,
        journal: Journal,
        slots: SlotUse,
        recipes: Recipes,
        scorer: GroupScorer,
        services: ServicesConfig,
        in_flight: Callable[[], str],
        tracer: trace.Tracer,
        clock: Clock,
    ) -> None:
        """`in_flight` describes which groups are sampled now and where; it and the addresses are for the log."""
        start = journal.starting_point
        self.info = info
        self.plan = plan
        self.journal = journal
        self.traces = StepTraces(tracer)
        self.slots = slots
        self.recipes = recipes
        self.scorer = scorer
        self.steps = StepCursors(recorded=start.recorded, uploaded=info.step, trained=start.unlogged_from - 1)
        self.tally = StepTally()
        """What was judged since the last batch was made."""
        self._services, self._in_flight = services, in_flight
        self.waits = waits_of(tracer)
        self._clock = clock
        self._submitted: dict[int, SubmittedStep] = {}
        self.changed = asyncio.Event()
        """Set whenever a group, a version or a refusal may let the loop go on."""
        recipes.restore(journal.algorithms(start.recorded))
        plan.next_step = start.recorded + 1
        plan.resume_after(drawn=start.drawn, next_sequence=start.next_sequence, again=start.redispatch)
        for group in start.ready:
            self.drop(plan.readmit(group))

    @property
    def run_id(self) -> str:
        return self.info.run_id

    # --- stages -----------------------------------------------------------------------------------

    @contextmanager
    def stage(self, name: str, number: int = 0, *, step: int | None = None) -> Iterator[None]:
        """The run waits for `name`, as long as the block lasts: the log names it, and its seconds are counted. `number`
        is the version or step that the name is about. Calls are traced under the span of `step`."""
        with ExitStack() as block:
            if step is not None:
                block.enter_context(trace.use_span(self.span(step)))
            described = partial(self._describe, name, number)
            block.enter_context(self.waits.waiting(name, lambda: described()[0], lambda: described()[1]))
            if name == "trainer":
                block.enter_context(self.counted("wait_for_ckpt_s"))
            yield

    @contextmanager
    def counted(self, seconds: Literal["wait_for_ckpt_s", "wait_for_rollouts_s"]) -> Iterator[None]:
        began_s = self._clock.now()
        try:
            yield
        finally:
            setattr(self.tally, seconds, getattr(self.tally, seconds) + self._clock.now() - began_s)

    def _describe(self, stage: str, number: int) -> tuple[str, Collection[str]]:
        services, plan, steps = self._services, self.plan, self.steps
        match stage:
            case "engines":
                return "engines to register at the weight hub", (services.weights,)
            case "version":
                return f"version {number} to reach the engines", (services.weights,)
            case "evaluation":
                return f"the evaluation at step {number}: {self._in_flight()}", services.rollout
            case "trainer":
                what = (
                    f"the trainer, which has trained step {steps.trained}; batches up to {steps.recorded} wait for it"
                )
                return what, (services.trainer,)
        assert stage == "groups", f"no stage {stage!r}"
        if plan.in_flight:
            what = f"groups of step {plan.next_step}, {plan.ready} are ready and {plan.in_flight} in flight"
            return f"{what}: {self._in_flight()}", services.rollout
        needed = plan.law.required_version(plan.next_step)
        what = f"version {needed} on the engines, which serve {plan.active_version}, to begin step {plan.next_step}"
        return what, (services.trainer, services.weights)

    # --- counting ---------------------------------------------------------------------------------

    def count(self, group: RolloutGroup, screened: Screened) -> None:
        """Counts what was dropped of a group that was judged, and the group itself when nothing of it is kept."""
        self.drop(screened)
        if not screened.kept:
            self.tally.discarded.append(group)
            self.tally.zero_signal_groups += any(why is DropReason.ZERO_SIGNAL for _, why in screened.dropped)

    def drop(self, screened: Screened) -> None:
        """Counts the rollouts that were dropped, each once: in the ledger, and for the record of the step."""
        for rollout, reason in screened.dropped:
            self.journal.drop(rollout.rollout_id, reason)
            self.tally.drop(reason)

    # --- steps that the trainer has ---------------------------------------------------------------

    def add_step(self, submitted: SubmittedStep) -> None:
        """Keeps a step in memory, with what its record needs, until it is done."""
        self._submitted[submitted.step] = submitted

    async def take_step(self, step: int) -> SubmittedStep:
        """A step, which memory then holds no longer; one of an earlier process is read from the journal. Raises
        RunError when the journal does not have it either."""
        if (known := self._submitted.pop(step, None)) is not None:
            return known
        groups, assembled = await self.journal.load_step(step)
        return SubmittedStep(step=step, groups=groups, assembled=assembled, tally=StepTally())

    # --- what the uploader needs (UploadedRun) ------------------------------------------------------

    async def batch(self, step: int) -> Batch:
        """The batch of a step, from memory or from the journal. Raises RunError when neither has it."""
        known = self._submitted.get(step)
        return known.assembled.batch if known is not None else await self.journal.load_batch(step)

    def span(self, step: int) -> trace.Span:
        return self.traces.span(step)

    def go_back(self, step: int, done: int) -> None:
        """The trainer restarted at `step`: those after it, up to `done`, are done again. Raises RunError when the batch
        of one is no longer kept."""
        self.journal.go_back(step, done)
        self.plan.rolled_back(step)

    def durable(self, step: int) -> None:
        self.journal.durable(step)

    def refused(self) -> None:
        self.changed.set()


class StepTraces:
    """The traces of steps: a span `rl.step` each, from the first rollout dispatched for it to its version committed.
    Groups, batch and version of the step are traced under it."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._open: dict[int, trace.Span] = {}

    def span(self, step: int) -> trace.Span:
        """The span of a step, to make current around calls that belong to it; it starts with the first call."""
        if step not in self._open:
            self._open[step] = self._tracer.start_span(STEP_SPAN, attributes={"rl.step": step})
        return self._open[step]

    def traceparent(self, step: int) -> str:
        return traceparent_of(self.span(step))

    @contextmanager
    def batch(self, step: int) -> Iterator[trace.Span]:
        inside = trace.set_span_in_context(self.span(step))
        with self._tracer.start_as_current_span(BATCH_SPAN, context=inside, attributes={"rl.step": step}) as span:
            yield span

    def end(self, step: int, attributes: Mapping[str, float]) -> None:
        if span := self._open.pop(step, None):
            span.set_attributes(dict(attributes))
            span.end()

    def close(self) -> None:
        for span in self._open.values():
            span.set_status(trace.Status(trace.StatusCode.ERROR, "the run ended first"))
            span.end()
        self._open.clear()


class SlotUse:
    """How long no rollout is out, how many slots of the rollout services stand idle, and how many of them while a batch
    waits for groups. The dispatcher reports when groups begin and end, the loop when it waits."""

    def __init__(self, now: Callable[[], float], slots: Callable[[], int | None]) -> None:
        """`slots` are the rollouts that the services run at once, read at each report; None until they report it."""
        self._now = now
        self._ask = slots
        self._slots = slots()
        self._out: dict[str, int] = {}  # rollouts by group
        self._total_out = 0
        self._waiting = False
        self._since_s = now()
        self._all_s = self._idle_s = self._tail_s = self._passed_s = self._none_out_s = 0.0

    @property
    def rollouts(self) -> int:
        return self._total_out

    def begin(self, group_id: str, rollouts: int) -> None:
        self._add_up()
        self._out[group_id] = rollouts
        self._total_out += rollouts

    def rollout_ended(self, group_id: str) -> None:
        if self._out.get(group_id, 0) > 0:
            self._add_up()
            self._out[group_id] -= 1
            self._total_out -= 1

    def end(self, group_id: str) -> None:
        self._add_up()
        self._total_out -= self._out.pop(group_id, 0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._add_up()
        self._waiting = True
        try:
            yield
        finally:
            self._add_up()
            self._waiting = False

    def idle_shares(self) -> dict[str, float]:
        """The metrics of the time since the last call; without those of the slots where these are not known."""
        self._add_up()
        shares = {}
        if self._passed_s > 0.0:
            shares["perf/engines_idle"] = self._none_out_s / self._passed_s
        if self._all_s > 0.0:
            shares["perf/idle_slots"] = self._idle_s / self._all_s
            shares["perf/tail_idle_slots"] = self._tail_s / self._all_s
        self._all_s = self._idle_s = self._tail_s = self._passed_s = self._none_out_s = 0.0
        return shares

    def _add_up(self) -> None:
        now_s = self._now()
        passed_s, self._since_s = now_s - self._since_s, now_s
        self._passed_s += passed_s
        self._none_out_s += 0.0 if self._total_out else passed_s
        slots, self._slots = self._slots, self._ask()
        if slots is None:
            return
        idle_s = passed_s * max(0, slots - self._total_out)
        self._all_s += passed_s * slots
        self._idle_s += idle_s
        self._tail_s += idle_s if self._waiting else 0.0
