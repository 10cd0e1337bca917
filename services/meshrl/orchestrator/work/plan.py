"""The plan of work: how many groups may be in flight, and which step takes which; driven by the loop, no I/O.

Every group outstanding (in flight, or finished and not yet taken) holds as many slots as its environment's groups have
rollouts. A step has `batch_size` slots, and the law sets the last step with open slots, so generation cannot run
further ahead than the law allows however groups finish, fail or are filtered. A group is begun while a slot is open,
and a step takes whole groups, first dispatched first, until it has `batch_size` slots: where groups differ in size,
either may go beyond by less than one group. A group that lost rollouts still counts whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshrl.orchestrator.work.screening import MIN_SURVIVORS, DropReason, ReadyGroup, Screened, screen_stale
from meshrl.orchestrator.work.staleness import StalenessLaw
from meshrl.orchestrator.work.task_schedule import TaskSchedule
from meshrl.sampling.groups import GroupTicket, RolloutGroup, rollout_seed
from meshrl.wire.types import Rollout

Screen = Callable[[str, Sequence[Rollout]], Screened]
"""Judges the rollouts of a group of an environment."""


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    batch_size: int
    group_sizes: Mapping[str, int]
    """Rollouts a task, by environment."""
    max_inflight_rollouts: int | None = None
    last_step: int | None = None
    least_rollouts: Mapping[str, int] = field(default_factory=dict)
    """Of a group that loses some, by environment; MIN_SURVIVORS where not said."""

    @property
    def largest_group(self) -> int:
        return max(self.group_sizes.values())


class WorkPlan:
    """State: the next step to take groups for, the active version, groups in flight and groups ready."""

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
        """Groups sample with seeds made from `seed`, or with none where it is None."""
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
        self._ready: dict[str, ReadyGroup] = {}
        self._again: deque[GroupTicket] = deque()
        self._slots = 0  # held by what is in flight or ready
        self._slots_in_flight = 0

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def slots(self) -> int:
        """Slots that are held by groups in flight or ready."""
        return self._slots

    @property
    def exhausted(self) -> bool:
        return self.limits.last_step is not None and self.next_step > self.limits.last_step

    def room(self) -> int:
        """Rollouts whose groups may be dispatched now; the last group may go beyond."""
        newest = self.law.newest_admissible_step(self.active_version)
        if self.limits.last_step is not None:
            newest = min(newest, self.limits.last_step)
        most = self.limits.max_inflight_rollouts
        if most is not None and most - self._slots_in_flight < self.limits.largest_group:
            return 0
        return max(0, self.limits.batch_size * (newest - self.next_step + 1) - self._slots)

    def _size(self, ticket: GroupTicket) -> int:
        return self.limits.group_sizes[ticket.task.environment]

    def _begin(self, ticket: GroupTicket) -> None:
        self._in_flight[ticket.group_id] = ticket
        self._slots += self._size(ticket)
        self._slots_in_flight += self._size(ticket)

    def _lost(self, ticket: GroupTicket) -> None:
        """The group comes to nothing: another may take its slots, and its draw where the mixture is followed."""
        self._slots -= self._size(ticket)
        self.schedule.give_back(ticket.task.environment)

    def dispatch(self, group_id: str) -> GroupTicket | None:
        """Admits one more group under `group_id`; None while there is no room."""
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
        for_step = self.next_step + self._slots // self.limits.batch_size
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
        """Goes on behind the last step that an earlier process made a batch of, and the tasks that it drew; those of
        the tickets `again` come first."""
        self.next_step = step + 1
        self.schedule.skip(drawn)
        self._sequence = max(self._sequence, next_sequence)
        self._again.extend(replace(ticket, replaces=ticket.group_id) for ticket in again)

    def readmit(self, group: RolloutGroup) -> Screened:
        """Judges a group that an earlier process finished; what is kept waits for a step as any other."""
        self._begin(group.ticket)
        return self.finish(group)

    def finish(self, group: RolloutGroup) -> Screened:
        """Judges a group that is over; what is kept waits for a step, what is dropped frees its slot."""
        self._slots_in_flight -= self._size(self._in_flight.pop(group.ticket.group_id))
        return self._judge(group, group.rollouts)

    def take_back(self, step: int, groups: Sequence[ReadyGroup]) -> list[Screened]:
        """Groups that the batches of `step` and after had come back, as far as they are `kept`: `step` is next again.
        Returns for each what is left of it."""
        self.next_step = step
        for ready in groups:
            self._slots += self._size(ready.group.ticket)
        return [self._judge(ready.group, ready.kept) for ready in groups]

    def _judge(self, group: RolloutGroup, rollouts: Sequence[Rollout]) -> Screened:
        group_id = group.ticket.group_id
        screened = self._screen(group.ticket.task.environment, rollouts)
        self.zero_signal_in_a_row += screened.zero_signal
        if screened.kept:
            self.zero_signal_in_a_row = 0
            self._ready[group_id] = ReadyGroup(group=group, kept=screened.kept)
        else:
            self._lost(group.ticket)
        return screened

    def activated(self, version: int) -> None:
        """Engines serve `version` now; an older one than known changes nothing."""
        self.active_version = max(self.active_version, version)

    def rolled_back(self, version: int) -> None:
        """The trainer restarted at `version`: engines come to serve it, or later ones made again."""
        self.active_version = min(self.active_version, version)

    def stale_in_flight(self) -> list[str]:
        """Groups in flight that began on a version too old for the next step: finishing them would be for nothing."""
        return [
            group_id
            for group_id, ticket in self._in_flight.items()
            if not self.law.usable(step=self.next_step, oldest_version=ticket.active_version)
        ]

    def drop_stale(self) -> list[tuple[Rollout, DropReason]]:
        """Drops what the next step may not train on; returns the rollouts that groups have lost, with the reasons."""
        dropped: list[tuple[Rollout, DropReason]] = []
        for group_id, ready in list(self._ready.items()):
            least = self.limits.least_rollouts.get(ready.group.ticket.task.environment, MIN_SURVIVORS)
            screened = screen_stale(ready.kept, step=self.next_step, law=self.law, least=least)
            if not screened.dropped:
                continue
            dropped += screened.dropped
            if screened.kept:
                self._ready[group_id] = ReadyGroup(group=ready.group, kept=screened.kept)
            else:
                del self._ready[group_id]
                self._lost(ready.group.ticket)
        return dropped

    def take(self) -> list[ReadyGroup] | None:
        """The groups of the next step, first dispatched first, once there are enough; then the step after is next. Call
        drop_stale first. None while too few groups are ready. A synchronous step takes all that was begun for it: what
        it left would be of another version than the next."""
        synchronous = self.law.synchronous
        if synchronous and self._in_flight:
            return None
        chosen, slots = [], 0
        for ready in sorted(self._ready.values(), key=lambda ready: ready.group.ticket.sequence):
            if slots >= self.limits.batch_size and not synchronous:
                break
            chosen.append(ready)
            slots += self._size(ready.group.ticket)
        if slots < self.limits.batch_size:
            return None
        self.next_step += 1
        for ready in chosen:
            del self._ready[ready.group.ticket.group_id]
            self._slots -= self._size(ready.group.ticket)
        return chosen
