"""Random interleavings of dispatch, finish, loss, training and activation: the law holds in every one."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.orchestrator.ledger.rules import Ledger
from meshrl.orchestrator.work.plan import PlanLimits, StalenessLaw, TaskSchedule, TrainSource, WorkPlan, screen_stale
from meshrl.orchestrator.work.screening import screen_finished
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef
from meshrl.wire.types import VersionSpan
from rl_streams import rollout_of


class Run:
    """A run without I/O: engines, trainer and hub are numbers that the drawn actions move."""

    def __init__(self, level: int, off_policy: int, groups: int, sizes: tuple[int, int], last_step: int) -> None:
        self.law = StalenessLaw(max_async_level=level, max_off_policy_steps=off_policy)
        self.plan = WorkPlan(
            law=self.law,
            limits=PlanLimits(
                batch_size=groups * max(sizes),
                group_sizes=dict(zip("ef", sizes, strict=True)),
                least_rollouts={"e": 2, "f": 2},
                max_zero_signal_groups=99,
                last_step=last_step,
            ),
            schedule=TaskSchedule([TrainSource(environment=name, ratio=1, num_tasks=3) for name in "ef"], seed=0),
            screen=lambda _, rollouts: screen_finished(
                rollouts, drop_empty=True, drop_zero_signal=True, tolerance=0.0, least=2
            ),
            next_step=1,
            active_version=0,
            seed=0,
        )
        self.ledger = Ledger(lambda entry: None)
        self.in_flight: list[GroupTicket] = []
        self.training: list[int] = []
        self.trained_version = 0
        self.groups = 0

    def dispatch(self) -> None:
        ticket = self.plan.dispatch(f"g{self.groups}")
        if ticket is None:
            return
        self.groups += 1
        assert self.plan.active_version >= self.law.required_version(ticket.for_step)
        assert ticket.for_step - 1 - self.law.max_async_level <= ticket.min_version <= self.plan.active_version
        assert ticket.for_step <= self.plan.active_version + 1 + self.law.max_async_level
        self.in_flight.append(ticket)
        self.ledger.dispatch(ticket)

    def finish(self, data: st.DataObject) -> None:
        if not self.in_flight:
            return
        ticket = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1), label="group"))
        group = RolloutGroup(ticket=ticket)
        for place in range(ticket.size):
            fate = data.draw(st.sampled_from(["win", "lose", "fail", "cancel"]), label="fate")
            if fate == "fail":
                self.ledger.fail(ticket.group_id, f"{ticket.group_id}:{place}", "ENGINE_FAILED")
            elif fate != "cancel":
                version = data.draw(st.integers(ticket.min_version, self.plan.active_version), label="version")
                group.rollouts.append(rollout_of(ticket, place, float(fate == "win"), version))
                self.ledger.finish(ticket, f"{ticket.group_id}:{place}", version)
        self.ledger.close_group(ticket.group_id, cancelled=ticket.size)
        for lost, reason in self.plan.finish(group).dropped:
            self.ledger.drop(lost.rollout_id, reason.value)

    def take(self) -> None:
        step = self.plan.next_step
        for lost, reason in self.plan.drop_stale():
            self.ledger.drop(lost.rollout_id, reason.value)
        taken = self.plan.take()
        if taken is None:
            return
        for group in taken:
            assert len(group.kept) >= 2
            for kept in group.kept:
                assert (
                    self.law.staleness(step=step, oldest_version=kept.oldest_version) <= self.law.max_off_policy_steps
                )
                if self.law.max_async_level == 0:
                    assert kept.oldest_version == step - 1
            self.ledger.batch([kept.rollout_id for kept in group.kept], step)
        self.training.append(step)

    def train(self) -> None:
        if self.training:
            self.trained_version = self.training.pop(0)
            self.ledger.train(self.trained_version)

    def activate(self) -> None:
        self.plan.activated(self.trained_version)


@given(
    versions=st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 9)), min_size=1, max_size=4),
    step=st.integers(1, 12),
    off_policy=st.integers(0, 5),
)
def test_a_step_trains_no_rollout_with_a_token_or_a_prompt_from_before_the_law(
    versions: list[tuple[int, int | None]], step: int, off_policy: int
) -> None:
    law = StalenessLaw(max_async_level=1, max_off_policy_steps=off_policy)
    ticket = GroupTicket(
        group_id="g",
        task=TaskRef(environment="e", index=0),
        size=1,
        for_step=step,
        min_version=0,
        active_version=0,
        seed=None,
    )
    one = rollout_of(ticket, 0, 1.0, 0)
    (sample,) = one.samples
    samples = tuple(
        replace(sample, version_spans=(VersionSpan(start=1, end=2, version=version, prompt_version=prompt),))
        for version, prompt in versions
    )
    oldest = min(version for span in versions for version in span if version is not None)
    screened = screen_stale([replace(one, samples=samples)], step=step, law=law, least=1)
    assert bool(screened.kept) == (step - 1 - oldest <= off_policy)


@settings(max_examples=150, deadline=None)
@given(
    level=st.integers(0, 3),
    off_policy=st.integers(0, 4),
    groups=st.integers(1, 3),
    sizes=st.tuples(st.integers(2, 3), st.integers(2, 5)),
    last_step=st.integers(1, 8),
    actions=st.lists(
        st.sampled_from(["dispatch", "dispatch", "finish", "finish", "take", "train", "activate"]), max_size=120
    ),
    data=st.data(),
)
def test_admission_and_use_keep_to_the_law_and_every_rollout_is_counted_once(
    level: int,
    off_policy: int,
    groups: int,
    sizes: tuple[int, int],
    last_step: int,
    actions: list[str],
    data: st.DataObject,
) -> None:
    run = Run(level, off_policy, groups, sizes, last_step)
    for action in actions:
        if action == "finish":
            run.finish(data)
        else:
            getattr(run, action)()
        # Steps whose slots may be open, seen from the version that engines serve.
        slots = run.plan.slots
        ahead = run.plan.next_step + max(0, slots - max(sizes)) // (groups * max(sizes))
        assert not slots or ahead <= run.plan.active_version + 1 + level
        assert run.ledger.balance().exact
    run.ledger.end("run_ended")
    assert run.ledger.balance().exact
    assert run.ledger.balance().open == 0


@given(
    ratios=st.lists(st.floats(0.05, 20.0), min_size=1, max_size=5),
    draws=st.integers(1, 200),
    seed=st.integers(0, 2**32),
)
def test_every_environment_stays_near_its_ratio_and_no_task_repeats_within_an_epoch(
    ratios: list[float], draws: int, seed: int
) -> None:
    sources = [TrainSource(environment=str(i), ratio=ratio, num_tasks=i + 2) for i, ratio in enumerate(ratios)]
    schedule = TaskSchedule(sources, seed=seed)
    drawn: dict[str, list[int]] = {source.environment: [] for source in sources}
    for _ in range(draws):
        task = schedule.next_task()
        drawn[task.environment].append(task.index)
    for source in sources:
        share = source.ratio / sum(ratios)
        indices = drawn[source.environment]
        assert abs(len(indices) - share * draws) <= len(ratios)
        for start in range(0, len(indices), source.num_tasks or 1):
            epoch = indices[start : start + (source.num_tasks or 1)]
            assert len(set(epoch)) == len(epoch)
