"""Divides the training thread among runs: deficit round robin (Shreedhar and Varghese, 1995) over slices of batches.

A slice is the next rows of a run's batch, one for each group of ranks that trains rows of its own. Runs take turns in a
ring. At its turn a run is given its quantum of tokens and trains slices while its credit lasts; what is left it keeps
for its next turn as long as it has work. No clock and no I/O: the loop asks for each turn and trains what it is given.

Bound: between a run that has work and its next turn lie the quanta of the other runs, and from each of them at most one
slice more than its quantum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(kw_only=True)
class _Member:
    """A run in the ring. `credit` is in tokens: below 0 a slice was larger than what was left."""

    quantum: float
    credit: float = 0.0
    tokens: float = 0.0


class FairScheduler:
    """The ring of runs. `quantum_tokens` are those of a run of share 1 at each turn."""

    def __init__(self, quantum_tokens: int) -> None:
        self._quantum_tokens = quantum_tokens
        self._members: dict[str, _Member] = {}
        self._ring: deque[str] = deque()
        self._at_turn: str | None = None

    def add(self, run_id: str, share: float = 1.0) -> None:
        """Puts a run at the end of the ring, or changes its share. Raises ValueError for a share not above 0."""
        if not 0.0 < share < float("inf"):
            raise ValueError(f"the share of run {run_id!r} must be above 0 and finite, got {share:g}; 1 is usual")
        quantum = share * self._quantum_tokens
        if run_id in self._members:
            self._members[run_id].quantum = quantum
            return
        self._members[run_id] = _Member(quantum=quantum)
        self._ring.append(run_id)

    def remove(self, run_id: str) -> None:
        """Takes a run out of the ring, with its credit."""
        del self._members[run_id]
        self._ring.remove(run_id)
        if self._at_turn == run_id:
            self._at_turn = None

    def next_run(self, slices: Mapping[str, int]) -> str | None:
        """The run that trains now; None when none can. `slices`: tokens of the next slice of each run that can train.

        A run that is left out, because it is suspended, publishes or waits for data, loses its turn and its credit, so
        that it cannot save up a burst. What it owes it still owes.
        """
        for run_id, member in self._members.items():
            if run_id not in slices:
                member.credit = min(member.credit, 0.0)
        if not slices:
            return None
        for _ in range(len(self._ring) + 1):
            if self._at_turn is not None and self._at_turn in slices and self._members[self._at_turn].credit > 0:
                return self._at_turn
            self._at_turn = None
            while (run_id := self._ring[0]) not in slices:
                self._ring.rotate(-1)
            self._ring.rotate(-1)
            member = self._members[run_id]
            member.credit += member.quantum
            self._at_turn = run_id
        # Slices may be many times a quantum: then turns go round until a debt is paid.
        turns = min(-(-max(0.0, -self._members[run_id].credit) // self._members[run_id].quantum) for run_id in slices)
        for run_id in slices:
            self._members[run_id].credit += turns * self._members[run_id].quantum
        return self.next_run(slices)

    @property
    def ring(self) -> tuple[str, ...]:
        return tuple(self._ring)

    def charge(self, run_id: str, tokens: int) -> None:
        member = self._members[run_id]
        member.credit -= tokens
        member.tokens += tokens

    def used_share(self, run_id: str) -> float:
        """Of the tokens that the runs in the ring have trained, those of this one; 0 for one that is not in it yet."""
        total = sum(member.tokens for member in self._members.values())
        member = self._members.get(run_id)
        return member.tokens / total if member is not None and total else 0.0
