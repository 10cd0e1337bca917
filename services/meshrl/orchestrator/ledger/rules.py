"""The rules of the ledger: each rollout is counted once, from dispatch to its end; the journal reports the events.

    dispatched -> finished <-> batched <-> trained
         |            └----------┴----------┴-----> dropped (why)
         ├-> failed (why)
         └-> cancelled (why)

The ways back are for a trainer that restarts at an earlier step: what it forgot is batched again for the same step, or
finished again where that batch is gone. A trained rollout is final once its step is durable. The balance is exact:
dispatched = trained + dropped + failed + cancelled + open.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from meshrl.sampling.groups import GroupTicket


class RolloutState(enum.Enum):
    DISPATCHED = "dispatched"
    FINISHED = "finished"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"
    FAILED = "failed"
    CANCELLED = "cancelled"


TRANSITIONS: Mapping[RolloutState, frozenset[RolloutState]] = {
    RolloutState.DISPATCHED: frozenset({RolloutState.FINISHED, RolloutState.FAILED, RolloutState.CANCELLED}),
    RolloutState.FINISHED: frozenset({RolloutState.BATCHED, RolloutState.DROPPED}),
    RolloutState.BATCHED: frozenset({RolloutState.TRAINED, RolloutState.DROPPED, RolloutState.FINISHED}),
    RolloutState.TRAINED: frozenset({RolloutState.BATCHED, RolloutState.DROPPED, RolloutState.FINISHED}),
    RolloutState.DROPPED: frozenset(),
    RolloutState.FAILED: frozenset(),
    RolloutState.CANCELLED: frozenset(),
}

OPEN_STATES = (RolloutState.DISPATCHED, RolloutState.FINISHED, RolloutState.BATCHED)


class LedgerError(Exception):
    """A rollout would be counted twice or not at all."""


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One rollout. `key` is its place in its group, known before its id; `trace_id` is in hexadecimal."""

    key: str
    group_id: str
    environment: str
    task_index: int
    for_step: int
    state: RolloutState
    rollout_id: str = ""
    oldest_version: int | None = None
    step: int | None = None
    reason: str = ""
    trace_id: str = ""

    @property
    def place(self) -> tuple[str, int]:
        """Sorts by group, and within one in the order of return."""
        group_id, _, place = self.key.rpartition("/")
        return group_id, int(place)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Where the dispatched rollouts went; `dropped` and `failed` by reason."""

    dispatched: int
    trained: int
    dropped: Mapping[str, int]
    failed: Mapping[str, int]
    cancelled: int
    open: int

    @property
    def exact(self) -> bool:
        lost = sum(self.dropped.values()) + sum(self.failed.values())
        return self.dispatched == self.trained + lost + self.cancelled + self.open

    def __str__(self) -> str:
        def total(counts: Mapping[str, int]) -> str:
            parts = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
            return f"{sum(counts.values())}" + (f" ({parts})" if parts else "")

        return (
            f"dispatched {self.dispatched} = trained {self.trained} + dropped {total(self.dropped)}"
            f" + failed {total(self.failed)} + cancelled {self.cancelled} + open {self.open}"
        )


class Ledger:
    """Applies events, refuses those against the rules, and hands every changed entry to `record`."""

    def __init__(self, record: Callable[[LedgerEntry], None]) -> None:
        self._record = record
        self._open: dict[str, LedgerEntry] = {}
        self._unassigned: dict[str, list[str]] = {}
        self._key_of: dict[str, str] = {}
        self._batched: dict[int, list[str]] = {}
        self._trained: dict[int, list[LedgerEntry]] = {}  # of steps that the trainer may still forget
        self._dispatched = 0
        self._ended: Counter[tuple[RolloutState, str]] = Counter()  # by state and reason

    def dispatch(self, ticket: GroupTicket) -> None:
        if ticket.group_id in self._unassigned:
            raise LedgerError(f"group {ticket.group_id} was dispatched before")
        self._unassigned[ticket.group_id] = []
        for place in range(ticket.size):
            self._open_entry(ticket, place)

    def finish(self, ticket: GroupTicket, rollout_id: str, oldest_version: int | None, trace_id: str = "") -> None:
        """A rollout came back scored. An episode of several agents yields more of them than were dispatched."""
        if rollout_id in self._key_of:
            raise LedgerError(f"rollout {rollout_id} finished before")
        if not self._unassigned[ticket.group_id]:
            self._open_entry(ticket, self._dispatched)
        key = self._unassigned[ticket.group_id].pop(0)
        self._key_of[rollout_id] = key
        self._move(key, RolloutState.FINISHED, rollout_id=rollout_id, oldest_version=oldest_version, trace_id=trace_id)

    def is_open(self, rollout_id: str) -> bool:
        """True from a rollout's return until it is dropped or trained."""
        return rollout_id in self._key_of

    @property
    def out(self) -> int:
        """Rollouts that have not come back."""
        return len(self._open) - len(self._key_of)

    def fail(self, group_id: str, rollout_id: str, reason: str, trace_id: str = "") -> None:
        """Failures beyond the number dispatched are ignored."""
        if self._unassigned[group_id]:
            key = self._unassigned[group_id].pop(0)
            self._move(key, RolloutState.FAILED, rollout_id=rollout_id, reason=reason, trace_id=trace_id)

    def close_group(
        self, group_id: str, *, cancelled: int = 0, cancelled_for: str = "rollout_service", reason: str = ""
    ) -> None:
        """Of its missing rollouts `cancelled` were cancelled; the others failed for `reason`."""
        for place, key in enumerate(self._unassigned.pop(group_id)):
            if place < cancelled:
                self._move(key, RolloutState.CANCELLED, reason=cancelled_for)
            else:
                self._move(key, RolloutState.FAILED, reason=reason or "LOST")

    def batch(self, rollout_ids: Iterable[str], step: int) -> None:
        keys = self._batched.setdefault(step, [])
        for rollout_id in rollout_ids:
            key = self._key(rollout_id)
            self._move(key, RolloutState.BATCHED, step=step)
            keys.append(key)

    def train(self, step: int) -> None:
        for key in self._batched.pop(step, []):
            self._move(key, RolloutState.TRAINED)

    def undo(self, step: int) -> None:
        """The trainer forgot a step: its rollouts are batched for it again."""
        for key in self._reopen(step):
            self._move(key, RolloutState.BATCHED)
            self._batched.setdefault(step, []).append(key)

    def release(self, step: int) -> None:
        """A step will not be trained with this batch: its rollouts wait for another."""
        for key in [*self._batched.pop(step, []), *self._reopen(step)]:
            self._move(key, RolloutState.FINISHED)

    def make_final(self, step: int) -> None:
        """Steps up to this one are durable."""
        for done in [known for known in self._trained if known <= step]:
            del self._trained[done]

    def interrupt(self, group_id: str, reason: str) -> None:
        """An earlier process dispatched this group: its missing rollouts never come."""
        for key in self._unassigned.pop(group_id, []):
            self._move(key, RolloutState.CANCELLED, reason=reason)

    def restore(self, entries: Iterable[LedgerEntry], ended: Mapping[tuple[RolloutState, str], int]) -> None:
        """Goes on where an earlier process stopped. `entries` are the open ones and those of trained steps that may
        still be forgotten; `ended` counts all others by state and reason."""
        self._ended.update(ended)
        self._dispatched += sum(ended.values())
        for entry in entries:
            self._dispatched += 1
            step = -1 if entry.step is None else entry.step
            if entry.state is RolloutState.TRAINED:
                self._ended[entry.state, entry.reason] += 1
                self._trained.setdefault(step, []).append(entry)
                continue
            self._open[entry.key] = entry
            if entry.state is RolloutState.DISPATCHED:
                self._unassigned.setdefault(entry.group_id, []).append(entry.key)
            else:
                self._key_of[entry.rollout_id] = entry.key
            if entry.state is RolloutState.BATCHED:
                self._batched.setdefault(step, []).append(entry.key)

    def drop(self, rollout_id: str, reason: str) -> None:
        self._move(self._key(rollout_id), RolloutState.DROPPED, reason=reason)

    def end(self, reason: str) -> None:
        self._batched.clear()
        self._trained.clear()
        for key, entry in list(self._open.items()):
            in_flight = entry.state is RolloutState.DISPATCHED
            self._move(key, RolloutState.CANCELLED if in_flight else RolloutState.DROPPED, reason=reason)
        self._unassigned.clear()

    def balance(self) -> Balance:
        def ended(state: RolloutState) -> dict[str, int]:
            return {reason: count for (how, reason), count in self._ended.items() if how is state}

        return Balance(
            dispatched=self._dispatched,
            trained=sum(ended(RolloutState.TRAINED).values()),
            dropped=ended(RolloutState.DROPPED),
            failed=ended(RolloutState.FAILED),
            cancelled=sum(ended(RolloutState.CANCELLED).values()),
            open=len(self._open),
        )

    def _open_entry(self, ticket: GroupTicket, place: int) -> None:
        entry = LedgerEntry(
            key=f"{ticket.group_id}/{place}",
            group_id=ticket.group_id,
            environment=ticket.task.environment,
            task_index=ticket.task.index,
            for_step=ticket.for_step,
            state=RolloutState.DISPATCHED,
        )
        self._dispatched += 1
        self._open[entry.key] = entry
        self._unassigned[ticket.group_id].append(entry.key)
        self._record(entry)

    def _key(self, rollout_id: str) -> str:
        try:
            return self._key_of[rollout_id]
        except KeyError:  # a programming error must not pass as a new rollout
            raise LedgerError(f"rollout {rollout_id} is not open") from None

    def _move(
        self,
        key: str,
        state: RolloutState,
        *,
        rollout_id: str | None = None,
        oldest_version: int | None = None,
        step: int | None = None,
        reason: str = "",
        trace_id: str = "",
    ) -> None:
        entry = self._open[key]
        if state not in TRANSITIONS[entry.state]:
            raise LedgerError(f"rollout {key} cannot go from {entry.state.value} to {state.value}")
        entry = replace(
            entry,
            state=state,
            rollout_id=entry.rollout_id if rollout_id is None else rollout_id,
            oldest_version=entry.oldest_version if oldest_version is None else oldest_version,
            step=None if state is RolloutState.FINISHED else entry.step if step is None else step,
            reason=reason,
            trace_id=trace_id or entry.trace_id,
        )
        if state in OPEN_STATES:
            self._open[key] = entry
        else:
            del self._open[key]
            self._key_of.pop(entry.rollout_id, None)
            self._ended[state, reason] += 1
            if state is RolloutState.TRAINED and entry.step is not None:
                self._trained.setdefault(entry.step, []).append(entry)
        self._record(entry)

    def _reopen(self, step: int) -> list[str]:
        entries = self._trained.pop(step, [])
        for entry in entries:
            self._ended[entry.state, entry.reason] -= 1
            self._open[entry.key] = entry
            self._key_of[entry.rollout_id] = entry.key
        return [entry.key for entry in entries]
