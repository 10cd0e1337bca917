"""Admits groups, starts their rollouts in order, and counts how each ends. No I/O; the time comes with each event.

A rollout goes waiting -> running -> finished | failed | cancelled; a waiting one may fail or be cancelled too.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.repeated_requests import SeenRequests
from meshrl.wire.types import RolloutFailure, RolloutRequest, RolloutSummary

RATE_WINDOW_S = 60.0
MAX_RUNS = 64  # that are counted apart, as many as a hub takes


class Outcome(enum.Enum):
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass
class AdmittedGroup:
    """One admitted request; its rollouts are numbered from 0."""

    request: RolloutRequest
    waiting: deque[int]
    running: set[int] = field(default_factory=set)
    ended: Counter[Outcome] = field(default_factory=Counter)
    sampled_tokens: int = 0

    @property
    def over(self) -> bool:
        return not self.waiting and not self.running

    @property
    def summary(self) -> RolloutSummary:
        return RolloutSummary(
            finished=self.ended[Outcome.FINISHED],
            failed=self.ended[Outcome.FAILED],
            cancelled=self.ended[Outcome.CANCELLED],
            sampled_tokens=self.sampled_tokens,
        )


class Admissions:
    """All groups of a server. A free place goes to the oldest group of the run with the fewest rollouts running.
    `max_per_run`: how many rollouts of one run may run and wait. `one_call_a_group`: refuse a group_id that runs; False
    for a worker process, which gets a call for each rollout."""

    def __init__(
        self,
        *,
        max_concurrent: int,
        max_queued: int,
        max_per_run: int | None = None,
        one_call_a_group: bool = True,
    ) -> None:
        self.running = 0
        self.queued = 0
        self.max_concurrent = max_concurrent
        """May change; rollouts beyond a lower one go on."""
        self._max_queued = max_queued
        self._max_per_run = max_per_run
        self._one_call_a_group = one_call_a_group
        self._groups: dict[str, AdmittedGroup] = {}
        self._group_ids: set[str] = set()
        self._waiting: dict[str, dict[str, AdmittedGroup]] = {}  # groups with rollouts that wait, by run, oldest first
        self._running_of: Counter[str] = Counter()  # rollouts, by run
        self._seen = SeenRequests()
        self._finished_at: deque[float] = deque()
        self.finished = 0
        self.failures: Counter[str] = Counter()
        self.ended_of: dict[str, Counter[Outcome]] = {}
        """Outcomes by run; beyond MAX_RUNS the oldest run is forgotten."""
        self.draining = False

    def refuse(self, request: RolloutRequest, now: float) -> None:
        """Raises the MeshError for which a group cannot be admitted now."""
        size, run_id = request.group_size, request.run_id
        if self.draining:
            raise MeshError(Reason.DRAINING, "this server is draining; send the group to another one")
        self._seen.refuse(request.request_id, now, self._groups)
        if self._one_call_a_group and request.group_id in self._group_ids:
            raise MeshError(
                Reason.DUPLICATE_REQUEST, f"group {request.group_id} is running; use a new group_id or wait for its end"
            )
        most = self.max_concurrent + self._max_queued
        if size > most:
            raise MeshError(Reason.INVALID_REQUEST, f"group_size is {size}, this server takes at most {most} rollouts")
        if self.running + self.queued + size > most:
            raise MeshError(
                Reason.OVERLOADED,
                f"{self.running} rollouts run and {self.queued} wait; {size} more exceed max_concurrent"
                f" {self.max_concurrent} plus max_queued {self._max_queued}",
                retry_after_s=1.0,
            )
        of_run = self.running_of(run_id) + self.waiting_of(run_id)
        if self._max_per_run is not None and of_run + size > self._max_per_run:
            raise MeshError(
                Reason.OVERLOADED,
                f"{of_run} rollouts of run {run_id!r} run or wait; {size} more exceed max_concurrent_per_run"
                f" {self._max_per_run}",
                retry_after_s=1.0,
            )

    def admit(self, request: RolloutRequest, now: float) -> AdmittedGroup:
        self.refuse(request, now)
        name, run_id = request.request_id, request.run_id
        self._seen.admit(name, now)
        if run_id not in self.ended_of and len(self.ended_of) == MAX_RUNS:
            del self.ended_of[next(iter(self.ended_of))]
        self.ended_of.setdefault(run_id, Counter())
        group = AdmittedGroup(request, deque(range(request.group_size)))
        self._groups[name] = self._waiting.setdefault(run_id, {})[name] = group
        self._group_ids.add(request.group_id)
        self.queued += request.group_size
        return group

    def start(self) -> list[tuple[AdmittedGroup, int]]:
        """Called after every rollout, so it looks only at groups that it starts from."""
        started: list[tuple[AdmittedGroup, int]] = []
        for _ in range(min(self.max_concurrent - self.running, self.queued)):
            group = next(iter(min(self._waiting.items(), key=lambda item: self._running_of[item[0]])[1].values()))
            index = group.waiting.popleft()
            group.running.add(index)
            self._running_of[group.request.run_id] += 1
            started.append((group, index))
            if not group.waiting:
                self._forget_waiting(group)
        self.running += len(started)
        self.queued -= len(started)
        return started

    def record_outcome(
        self,
        group: AdmittedGroup,
        index: int,
        outcome: Outcome,
        now: float,
        *,
        reason: str = "",
        sampled_tokens: int = 0,
    ) -> bool:
        """False if it had ended before (cancelled or late)."""
        if index not in group.running:
            return False
        group.running.discard(index)
        self.running -= 1
        self._running_of[group.request.run_id] -= 1
        self._count(group, outcome, now, reason, sampled_tokens)
        return True

    def end(
        self, group: AdmittedGroup, outcome: Outcome, now: float, *, reason: str = ""
    ) -> tuple[list[int], list[int]]:
        """Returns the rollouts that ran, for the caller to stop, and those that waited."""
        running, waiting = sorted(group.running), list(group.waiting)
        group.running.clear()
        group.waiting.clear()
        self.running -= len(running)
        self.queued -= len(waiting)
        self._running_of[group.request.run_id] -= len(running)
        self._forget_waiting(group)
        for _ in (*running, *waiting):
            self._count(group, outcome, now, reason, 0)
        return running, waiting

    def running_of(self, run_id: str) -> int:
        return self._running_of[run_id]

    def waiting_of(self, run_id: str) -> int:
        return sum(len(group.waiting) for group in list(self._waiting.get(run_id, {}).values()))

    def _forget_waiting(self, group: AdmittedGroup) -> None:
        of_run = self._waiting.get(group.request.run_id, {})
        of_run.pop(group.request.request_id, None)
        if not of_run:
            self._waiting.pop(group.request.run_id, None)

    def named(self, group_ids: Collection[str]) -> list[AdmittedGroup]:
        return [group for group in self._groups.values() if not group_ids or group.request.group_id in group_ids]

    def remove(self, group: AdmittedGroup) -> None:
        if self._groups.pop(group.request.request_id, None) is not None:
            self._group_ids.discard(group.request.group_id)

    def rate(self, now: float) -> float:
        self._forget_finished(now)
        return len(self._finished_at) / RATE_WINDOW_S

    def _count(self, group: AdmittedGroup, outcome: Outcome, now: float, reason: str, sampled_tokens: int) -> None:
        group.ended[outcome] += 1
        group.sampled_tokens += sampled_tokens
        self.ended_of.setdefault(group.request.run_id, Counter())[outcome] += 1
        if outcome is Outcome.FINISHED:
            self.finished += 1
            self._finished_at.append(now)
            self._forget_finished(now)
        elif outcome is Outcome.FAILED:
            self.failures[reason] += 1

    def _forget_finished(self, now: float) -> None:
        while self._finished_at and self._finished_at[0] < now - RATE_WINDOW_S:
            self._finished_at.popleft()


def rollout_failure(
    request: RolloutRequest, error: MeshError, rollout_id: str, traceparent: str = ""
) -> RolloutFailure:
    return RolloutFailure(
        rollout_id=rollout_id,
        group_id=request.group_id,
        reason=error.reason.name,
        message=error.message,
        retryable=error.reason.retryable,
        traceparent=traceparent,
    )


LATE = "not finished within deadline_s = "


def late(request: RolloutRequest) -> str:
    return f"{LATE}{request.deadline_s:g}"
