"""The plan of work: which task comes next, how many groups may be in flight, and which step takes which; no I/O.

A group in flight, or finished and not yet taken, holds as many slots as its environment's groups have rollouts, however
many it lost. A step has `batch_size` slots, and the law sets the last step with open slots. A group is begun while a
slot is open, and a step takes whole groups, first dispatched first, until it has `batch_size` slots: where groups
differ in size, either may go beyond by less than one group.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshrl.orchestrator.work.screening import DropReason, Screened, with_survivors
from meshrl.sampling.groups import GroupTicket, RolloutGroup, TaskRef, rollout_seed
from meshrl.wire.types import Rollout

Screen = Callable[[str, Sequence[Rollout]], Screened]

MOST_DRAWS = 4
"""With follow_mixture: most draws of an environment, as a multiple of its share."""


@dataclass(frozen=True, kw_only=True)
class StalenessLaw:
    """Bounds how far generation runs ahead of training and how old trained tokens are.

    Train step n (from 1) turns version n - 1 into version n. With k = max_async_level and m = max_off_policy_steps:

        admission   work for step n starts only while the active version is at least max(0, n - 1 - k)
        use         step n trains a rollout only while (n - 1) - oldest_version <= m
    """

    max_async_level: int
    max_off_policy_steps: int

    @property
    def synchronous(self) -> bool:
        return self.max_async_level == 0

    def required_version(self, step: int) -> int:
        return max(0, step - 1 - self.max_async_level)

    def newest_admissible_step(self, active_version: int) -> int:
        return active_version + 1 + self.max_async_level

    def staleness(self, *, step: int, oldest_version: int) -> int:
        """Versions between the policy that `step` trains and the oldest that sampled a token."""
        return (step - 1) - oldest_version

    def usable(self, *, step: int, oldest_version: int) -> bool:
        return self.staleness(step=step, oldest_version=oldest_version) <= self.max_off_policy_steps


@dataclass(frozen=True, kw_only=True)
class TrainSource:
    """A training environment: its share of the tasks, and how many it has (None: infinitely many)."""

    environment: str
    ratio: float
    num_tasks: int | None


@dataclass
class _Stream:
    """The tasks of one environment. Epoch e is a permutation that depends on (seed, environment, e) alone."""

    source: TrainSource
    seed: int
    drawn: int = 0
    before: int = 0  # of these, those by an earlier process that its share does not count
    given_back: int = 0  # groups that came to nothing
    _epoch: int = -1
    _order: list[int] = field(default_factory=list)

    def next_index(self) -> int:
        position = self.drawn
        self.drawn += 1
        if self.source.num_tasks is None:
            return position
        epoch, place = divmod(position, self.source.num_tasks)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(self.source.num_tasks))
            random.Random(f"{self.seed}/{self.source.environment}/{epoch}").shuffle(self._order)
        return self._order[place]


class TaskSchedule:
    """An endless, deterministic sequence of tasks. The environment that lags its share most comes next, so each count
    is within one draw per other environment of its ratio. With `follow_mixture` draws that were given back do not
    count, so that the groups that are trained have the ratios; an environment is then drawn at most MOST_DRAWS times as
    often as its ratio asks for, since the process began. Raises ValueError for an empty taskset."""

    def __init__(self, sources: Sequence[TrainSource], *, seed: int, follow_mixture: bool = False) -> None:
        for source in sources:
            if source.num_tasks == 0:
                raise ValueError(f"environment {source.environment!r} has no tasks; check the arguments of its taskset")
        total = sum(source.ratio for source in sources)
        self._shares = [source.ratio / total for source in sources]
        self._streams = [_Stream(source=source, seed=seed) for source in sources]
        self._follow_mixture = follow_mixture

    def next_task(self) -> TaskRef:
        fresh = [stream.drawn - stream.before for stream in self._streams]
        counted = [one - stream.given_back for one, stream in zip(fresh, self._streams, strict=True)]
        most = MOST_DRAWS * (sum(fresh) + 1)
        open_to = [place for place, share in enumerate(self._shares) if fresh[place] < most * share]
        total = sum(counted) + 1
        stream = self._streams[max(open_to, key=lambda place: self._shares[place] * total - counted[place])]
        return TaskRef(environment=stream.source.environment, index=stream.next_index())

    def give_back(self, environment: str) -> None:
        """A group of this environment came to nothing."""
        for stream in self._streams:
            stream.given_back += self._follow_mixture and stream.source.environment == environment

    def drawn(self) -> dict[str, int]:
        return {stream.source.environment: stream.drawn for stream in self._streams}

    def skip(self, drawn: Mapping[str, int]) -> None:
        """Goes on behind the tasks drawn before, by environment."""
        for stream in self._streams:
            stream.drawn += drawn.get(stream.source.environment, 0)
            stream.before = stream.drawn if self._follow_mixture else 0

    def epochs(self) -> dict[str, float]:
        return {
            stream.source.environment: stream.drawn / stream.source.num_tasks
            for stream in self._streams
            if stream.source.num_tasks is not None
        }


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    batch_size: int
    group_sizes: Mapping[str, int]
    """Rollouts a task, by environment."""
    least_rollouts: Mapping[str, int]
    """Of a group that loses some, by environment."""
    max_zero_signal_groups: int
    """In a row, after which the run ends."""
    max_inflight_rollouts: int | None = None
    last_step: int | None = None

    @property
    def largest_group(self) -> int:
        return max(self.group_sizes.values())


class WorkPlan:
    """The next step, the active version, and the groups in flight and ready."""

    def __init__(
        self,
        *,
        law: StalenessLaw,
        limits: PlanLimits,
        schedule: TaskSchedule,
        screen: Screen,
        next_step: int,
        active_version: int,
        seed: int | None,
    ) -> None:
        """Without `seed` groups sample without seeds."""
        self.law = law
        self.limits = limits
        self.next_step = next_step
        self.active_version = active_version
        self.zero_signal_in_a_row = 0
        self.schedule = schedule
        self._screen = screen
        self._seed = seed
        self._sequence = 0
        self._in_flight: dict[str, GroupTicket] = {}
        self._ready: dict[str, RolloutGroup] = {}
        self._again: deque[GroupTicket] = deque()
        self.slots = 0
        """Held by groups in flight or ready."""
        self._slots_in_flight = 0

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def exhausted(self) -> bool:
        return self.limits.last_step is not None and self.next_step > self.limits.last_step

    def room(self) -> int:
        newest = self.law.newest_admissible_step(self.active_version)
        if self.limits.last_step is not None:
            newest = min(newest, self.limits.last_step)
        most = self.limits.max_inflight_rollouts
        if most is not None and most - self._slots_in_flight < self.limits.largest_group:
            return 0
        return max(0, self.limits.batch_size * (newest - self.next_step + 1) - self.slots)

    def _size(self, ticket: GroupTicket) -> int:
        return self.limits.group_sizes[ticket.task.environment]

    def _begin(self, ticket: GroupTicket) -> None:
        self._in_flight[ticket.group_id] = ticket
        self.slots += self._size(ticket)
        self._slots_in_flight += self._size(ticket)

    def _lost(self, ticket: GroupTicket) -> None:
        """Its slots are free, and its draw if the mixture is followed."""
        self.slots -= self._size(ticket)
        self.schedule.give_back(ticket.task.environment)

    def dispatch(self, group_id: str) -> GroupTicket | None:
        """None while there is no room."""
        if self.room() == 0:
            return None
        if self._again:
            ticket = self._again.popleft()
        else:
            sequence, self._sequence = self._sequence, self._sequence + 1
            task = self.schedule.next_task()
            ticket = GroupTicket(
                group_id=group_id,
                task=task,
                size=self.limits.group_sizes[task.environment],
                for_step=0,
                min_version=0,
                active_version=0,
                seed=None if self._seed is None else rollout_seed(self._seed, sequence * self.limits.largest_group),
                sequence=sequence,
            )
        for_step = self.next_step + self.slots // self.limits.batch_size
        ticket = replace(
            ticket,
            group_id=group_id,
            for_step=for_step,
            min_version=self.law.required_version(for_step),
            active_version=self.active_version,
        )
        self._begin(ticket)
        return ticket

    def resume_after(
        self, step: int, *, drawn: Mapping[str, int], next_sequence: int, again: Sequence[GroupTicket]
    ) -> None:
        """Goes on behind the last batch of an earlier process and the tasks that it drew, with the tickets `again`
        first."""
        self.next_step = step + 1
        self.schedule.skip(drawn)
        self._sequence = max(self._sequence, next_sequence)
        self._again.extend(replace(ticket, replaces=ticket.group_id) for ticket in again)

    def readmit(self, group: RolloutGroup) -> Screened:
        """Judges a group that an earlier process finished."""
        self._begin(group.ticket)
        return self.finish(group)

    def finish(self, group: RolloutGroup) -> Screened:
        """Judges a group that is over: kept rollouts wait for a step, a dropped group frees its slots."""
        self._slots_in_flight -= self._size(self._in_flight.pop(group.ticket.group_id))
        return self._judge(group, group.rollouts)

    def take_back(self, step: int, groups: Sequence[RolloutGroup]) -> list[Screened]:
        """Judges the `kept` rollouts of dissolved batches; `step`, the first of these, is next again."""
        self.next_step = step
        self.slots += sum(self._size(group.ticket) for group in groups)
        return [self._judge(group, group.kept) for group in groups]

    def _judge(self, group: RolloutGroup, rollouts: Sequence[Rollout]) -> Screened:
        screened = self._screen(group.ticket.task.environment, rollouts)
        self.zero_signal_in_a_row += screened.zero_signal
        group.kept = screened.kept
        if group.kept:
            self.zero_signal_in_a_row = 0
            self._ready[group.ticket.group_id] = group
        else:
            self._lost(group.ticket)
        return screened

    def activated(self, version: int) -> None:
        self.active_version = max(self.active_version, version)

    def rolled_back(self, version: int) -> None:
        self.active_version = min(self.active_version, version)

    def stale_in_flight(self) -> list[str]:
        """Groups that began on a version too old for the next step."""
        return [
            group_id
            for group_id, ticket in self._in_flight.items()
            if not self.law.usable(step=self.next_step, oldest_version=ticket.active_version)
        ]

    def drop_stale(self) -> list[tuple[Rollout, DropReason]]:
        dropped: list[tuple[Rollout, DropReason]] = []
        for group_id, group in list(self._ready.items()):
            least = self.limits.least_rollouts[group.ticket.task.environment]
            screened = screen_stale(group.kept, step=self.next_step, law=self.law, least=least)
            if not screened.dropped:
                continue
            dropped += screened.dropped
            group.kept = screened.kept
            if not group.kept:
                del self._ready[group_id]
                self._lost(group.ticket)
        return dropped

    def take(self) -> list[RolloutGroup] | None:
        """The groups of the next step, first dispatched first; None while too few are ready. Call drop_stale first. A
        synchronous step takes all that was begun for it, which would otherwise be of another version than the next
        step's."""
        synchronous = self.law.synchronous
        if synchronous and self._in_flight:
            return None
        chosen, slots = [], 0
        for group in sorted(self._ready.values(), key=lambda group: group.ticket.sequence):
            if slots >= self.limits.batch_size and not synchronous:
                break
            chosen.append(group)
            slots += self._size(group.ticket)
        if slots < self.limits.batch_size:
            return None
        self.next_step += 1
        for group in chosen:
            del self._ready[group.ticket.group_id]
            self.slots -= self._size(group.ticket)
        return chosen


def screen_stale(rollouts: Sequence[Rollout], *, step: int, law: StalenessLaw, least: int) -> Screened:
    kept: list[Rollout] = []
    stale: list[tuple[Rollout, DropReason]] = []
    for rollout in rollouts:
        oldest = rollout.oldest_version
        if oldest is None or law.usable(step=step, oldest_version=oldest):
            kept.append(rollout)
        else:
            stale.append((rollout, DropReason.STALE))
    return with_survivors(kept, stale, least=least)
