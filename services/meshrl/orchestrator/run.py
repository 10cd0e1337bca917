"""The state of one run that the loop's parts share: plan, journal, counters, batches, traces, and how far it has come.

The cursors are written by the uploader, the tally and the steps in memory here; the other parts change by their own
methods. All parts wait for the same `changed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from opentelemetry import trace

from meshrl.core.clock import Clock
from meshrl.core.config.shared import ServicesConfig
from meshrl.core.telemetry.tracing import BATCH_SPAN, STEP_SPAN, traceparent_of
from meshrl.core.telemetry.waits import waits_of
from meshrl.core.waiting import Pulse
from meshrl.orchestrator.ledger.journal import Journal
from meshrl.orchestrator.work.batches import SubmittedStep
from meshrl.orchestrator.work.plan import WorkPlan
from meshrl.orchestrator.work.screening import DropReason, Screened, StepTally
from meshrl.sampling.groups import RolloutGroup
from meshrl.wire.types import Batch, Rollout, RunInfo


@dataclass(kw_only=True)
class StepCursors:
    """How far a run has come: trained <= uploaded <= recorded, but for steps of an earlier process."""

    recorded: int
    """The last step whose batch is on disk."""
    uploaded: int
    """The last step whose batch the trainer took."""
    trained: int
    """The last step that is done, as far as the loop knows."""
    suspended: str = ""
    """Why the trainer trains none of the run's batches now."""


class Run:
    """Continues from the journal; `info` is the trainer's description of the run at the start."""

    def __init__(
        self,
        info: RunInfo,
        *,
        plan: WorkPlan,
        journal: Journal,
        slots: SlotUse,
        services: ServicesConfig,
        in_flight: Callable[[], str],
        tracer: trace.Tracer,
        clock: Clock,
    ) -> None:
        """`in_flight` describes the groups that are sampled now, and where, for the log."""
        start = journal.starting_point
        self.info = info
        self.plan = plan
        self.journal = journal
        self.traces = StepTraces(tracer)
        self.slots = slots
        self.steps = StepCursors(recorded=start.recorded, uploaded=info.step, trained=start.unlogged_from - 1)
        self.tally = StepTally()
        """Of the time since the last batch."""
        self.services = services
        """Addresses, for errors."""
        self._in_flight = in_flight
        self.waits = waits_of(tracer)
        self.tracer = tracer
        self.clock = clock
        self._submitted: dict[int, SubmittedStep] = {}
        self.changed = Pulse()
        """Beats whenever a group, a batch, a step, a version or a refusal may let a part go on."""
        plan.resume_after(start.recorded, drawn=start.drawn, next_sequence=start.next_sequence, again=start.redispatch)
        for group in start.ready:
            self.drop(plan.readmit(group).dropped)

    # --- stages -----------------------------------------------------------------------------------

    @contextmanager
    def stage(self, name: str, number: int = 0, *, step: int | None = None) -> Iterator[None]:
        """The run waits for `name` during the block: the log names it. `number` is the version or step that it is
        about. Calls are traced under the span of `step`."""
        with ExitStack() as block:
            if step is not None:
                block.enter_context(trace.use_span(self.traces.span(step)))
            described = partial(self._describe, name, number)
            block.enter_context(self.waits.waiting(name, lambda: described()[0], lambda: described()[1]))
            if name == "trainer":
                block.enter_context(self.counted("time/wait_for_ckpt"))
            yield

    @contextmanager
    def counted(self, metric: str) -> Iterator[None]:
        """Adds the block's seconds to the next step's record. A batch that is dissolved leaves them to the one made
        anew: the run waited for both."""
        began_s = self.clock.now()
        try:
            yield
        finally:
            self.tally.wait(metric, self.clock.now() - began_s)

    def _describe(self, stage: str, number: int) -> tuple[str, Collection[str]]:
        services, plan, steps = self.services, self.plan, self.steps
        match stage:
            case "engines":
                return "engines to register at the weight hub", (services.weights,)
            case "version":
                return f"version {number} to reach the engines", (services.weights,)
            case "evaluation":
                return f"the evaluation at step {number}: {self._in_flight()}", services.rollout
            case "trainer":
                what = f"has trained step {steps.trained}; batches up to {steps.recorded} wait for it"
                if steps.suspended:
                    what = f"{what}, and the run is suspended ({steps.suspended})"
                return f"the trainer, which {what}", (services.trainer,)
        assert stage == "groups", f"no stage {stage!r}"
        if plan.in_flight:
            what = f"groups of step {plan.next_step}, {plan.ready} are ready and {plan.in_flight} in flight"
            return f"{what}: {self._in_flight()}", services.rollout
        needed = plan.law.required_version(plan.next_step)
        what = f"version {needed} on the engines, which serve {plan.active_version}, to begin step {plan.next_step}"
        return what, (services.trainer, services.weights)

    # --- counting ---------------------------------------------------------------------------------

    def count(self, group: RolloutGroup, screened: Screened) -> None:
        self.drop(screened.dropped)
        if not screened.kept:
            self.tally.discarded.append(group)
            self.tally.zero_signal_groups += screened.zero_signal

    def drop(self, dropped: Iterable[tuple[Rollout, DropReason]]) -> None:
        for rollout, reason in dropped:
            self.journal.drop(rollout.rollout_id, reason)
            self.tally.drop(reason)

    def take_tally(self) -> StepTally:
        """Counting begins anew."""
        tally, self.tally = self.tally, StepTally()
        tally.idle_shares = self.slots.idle_shares()
        return tally

    # --- steps that the trainer has ---------------------------------------------------------------

    def add_step(self, submitted: SubmittedStep) -> None:
        self._submitted[submitted.step] = submitted

    async def batch(self, step: int) -> Batch:
        """Raises RunError when neither memory nor the journal has it."""
        known = self._submitted.get(step)
        return known.assembled.batch if known is not None else await self.journal.load_batch(step)

    async def take_step(self, step: int) -> SubmittedStep:
        """Takes a step out of memory, or reads one of an earlier process. Raises RunError when it is lost."""
        if (known := self._submitted.pop(step, None)) is not None:
            return known
        groups, assembled = await self.journal.load_step(step)
        return SubmittedStep(step=step, groups=groups, assembled=assembled, tally=StepTally())


class StepTraces:
    """A span `rl.step` for each step, from its first rollout dispatched to its version committed, above its groups,
    batch and version."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._open: dict[int, trace.Span] = {}

    def span(self, step: int) -> trace.Span:
        """To make current around a step's calls; it starts with the first."""
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
    """How long no rollout is out, and how many slots of the rollout services are idle, apart while a batch waits for
    groups."""

    def __init__(self, now: Callable[[], float], slots: Callable[[], int | None], out: Callable[[], int]) -> None:
        """`slots` are the rollouts that the services run at once (None: not reported), `out` those that have not come
        back."""
        self._now = now
        self._read_slots, self._read_out = slots, out
        self._slots, self._out = slots(), out()
        self._waiting = False
        self._since_s = now()
        self._all_s = self._idle_s = self._tail_s = self._passed_s = self._none_out_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.note()
        self._waiting = True
        try:
            yield
        finally:
            self.note()
            self._waiting = False

    def idle_shares(self) -> dict[str, float]:
        """The metrics since the last call; none of slots while these are unknown."""
        self.note()
        shares = {}
        if self._passed_s > 0.0:
            shares["perf/engines_idle"] = self._none_out_s / self._passed_s
        if self._all_s > 0.0:
            shares["perf/idle_slots"] = self._idle_s / self._all_s
            shares["perf/tail_idle_slots"] = self._tail_s / self._all_s
        self._all_s = self._idle_s = self._tail_s = self._passed_s = self._none_out_s = 0.0
        return shares

    def note(self) -> None:
        """Counts the time until now; called when rollouts begin or end."""
        now_s = self._now()
        passed_s, self._since_s = now_s - self._since_s, now_s
        self._passed_s += passed_s
        out, self._out = self._out, self._read_out()
        self._none_out_s += 0.0 if out else passed_s
        slots, self._slots = self._slots, self._read_slots()
        if slots is None:
            return
        idle_s = passed_s * max(0, slots - out)
        self._all_s += passed_s * slots
        self._idle_s += idle_s
        self._tail_s += idle_s if self._waiting else 0.0
