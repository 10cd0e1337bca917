"""The training loop of rank 0: gives the runs their turns, a slice at a time, on the training thread.

Waits for batches, for requested checkpoints and, before it captures a version of a run, for the publication of the one
before; meanwhile other runs train.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from meshrl.core.telemetry.waits import Waits
from meshrl.trainer.ranks.commands import CommandSender, StopCommand
from meshrl.trainer.run_training import RunTraining
from meshrl.trainer.runs.steps import SaveRequest
from meshrl.trainer.runs.table import RunTable, Taken


@dataclass(frozen=True, kw_only=True)
class Joining:
    """Slices whose longest row is shorter than `below` share a pass of at most `room` tokens on each rank."""

    below: int
    room: int


class TrainerLoop:
    """Trains the runs of a table until the queue of its own run is closed."""

    def __init__(
        self,
        table: RunTable,
        own: RunTraining,
        commands: CommandSender,
        *,
        quantum_tokens: int | None = None,
        joining: Joining | None = None,
        waits: Waits | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`quantum_tokens` of a turn, None for whole batches. `joining` None: a pass has rows of one run. `on_end` is
        called after the last collective."""
        self._table, self._commands, self._waits = table, commands, waits or Waits()
        self._runs: dict[str, RunTraining] = {}
        self.scheduler = FairScheduler(quantum_tokens or 1)
        self._whole_batches, self._joining = quantum_tokens is None, joining
        self._on_end = on_end
        self.add(own, share=1.0)

    def add(self, run: RunTraining, share: float) -> None:
        self._runs[run.state.run_id] = run
        self.scheduler.add(run.state.run_id, share)

    def remove(self, run_id: str) -> bool:
        """Returns whether the run was here. It must have no step at hand."""
        if found := run_id in self._runs:
            self.scheduler.remove(run_id)
            del self._runs[run_id]
        return found

    def run(self) -> None:
        """Works until the queues close, then writes the last checkpoints. Raises errors that end the trainer."""
        try:
            while (taken := self._take()) is not None:
                for call in taken.calls:
                    call()
                for run_id, work in taken.work.items():
                    if isinstance(work, SaveRequest):
                        self._runs[run_id].save_on_request(work)
                    else:
                        self._runs[run_id].begin(work)
                self._turn()
            for run in self._runs.values():
                run.end()
            self._commands.send(StopCommand())
            for run in self._runs.values():  # as every rank does
                run.checkpointer.wait_for_save()
            self._on_end()
        except BaseException as error:  # reported to every watcher, then raised: the process ends and says why
            for queue in self._table:
                queue.crashed(f"the trainer stopped: {error}")
            raise

    def _turn(self) -> None:
        slices = {run_id: run.tokens for run_id, run in self._runs.items()}
        ready = {run_id: tokens for run_id, tokens in slices.items() if tokens is not None}
        run_id = self.scheduler.next_run(ready)
        if run_id is None:
            return
        run = self._runs[run_id]
        beside = self._beside(run, ready)
        with self._waits.waiting("step", f"its own work on step {run.state.next_step}{self._of(run_id)}"):
            run.advance(run.slices_left if self._whole_batches else 1, beside)
        for each in (run, *beside):
            self.scheduler.charge(each.state.run_id, ready[each.state.run_id])

    def _beside(self, run: RunTraining, ready: Container[str]) -> list[RunTraining]:
        if self._joining is None or self._whole_batches or (first := run.joinable) is None:
            return []
        longest, alike = first
        room, beside = self._joining.room - longest, []
        if longest >= self._joining.below:
            return []
        for other in (self._runs[run_id] for run_id in self.scheduler.ring if run_id in ready):
            if other is run or (found := other.joinable) is None or found[1] != alike:
                continue
            if found[0] < self._joining.below and found[0] <= room:
                room -= found[0]
                beside.append(other)
        return beside

    def _take(self) -> Taken | None:
        idle = frozenset(run_id for run_id, run in self._runs.items() if run.idle)
        blocked = all(run.tokens is None for run in self._runs.values())
        if not blocked:
            return self._table.take(idle, wait=False).result()
        publishing = {run_id: run for run_id, run in self._runs.items() if not run.idle}
        name, on = ("publication", ("weights",)) if publishing else ("batch", ("orchestrator",))
        words = " or ".join(
            (f"version {run.state.step_done - 1}" if publishing else f"batch {run.state.next_step}") + self._of(run_id)
            for run_id, run in (publishing or self._runs).items()
        )
        if publishing:
            words += " to be taken by the weight hub"
        with self._waits.waiting(name, words, on):
            future = self._table.take(
                idle, wait=True, until=lambda: any(run.tokens is not None for run in publishing.values())
            )
            return self._commands.wait(future, check=self._check_publications)

    def _of(self, run_id: str) -> str:
        return f" of {run_id}" if len(self._runs) > 1 else ""

    def _check_publications(self) -> float:
        """Seconds until one of them may have stood still for too long."""
        for run in self._runs.values():
            run.check_publication()
        return min((run.publication_left_s() for run in self._runs.values()), default=float("inf"))


@dataclass(kw_only=True)
class _Member:
    """A run in the ring. `credit` is in tokens: below 0 after a slice larger than it."""

    quantum: float
    credit: float = 0.0
    tokens: float = 0.0


class FairScheduler:
    """Divides the training thread among runs: deficit round robin (Shreedhar and Varghese, 1995) over slices of
    batches. `quantum_tokens` are given to a run of share 1 at each turn.

    A run that has work waits for the quanta of the other runs, and for at most one slice more of each.
    """

    def __init__(self, quantum_tokens: int) -> None:
        self._quantum_tokens = quantum_tokens
        self._members: dict[str, _Member] = {}
        self._ring: deque[str] = deque()
        self._at_turn: str | None = None

    def add(self, run_id: str, share: float = 1.0) -> None:
        self._members[run_id] = _Member(quantum=share * self._quantum_tokens)
        self._ring.append(run_id)

    def remove(self, run_id: str) -> None:
        del self._members[run_id]
        self._ring.remove(run_id)
        if self._at_turn == run_id:
            self._at_turn = None

    def next_run(self, slices: Mapping[str, int]) -> str | None:
        """The run that trains now, of those that can. `slices`: tokens of the next slice of each.

        A run that is left out loses its credit, but not its debt, so that it cannot save up a burst.
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
        """Of the tokens that the runs in the ring have trained; 0 for a run outside."""
        total = sum(member.tokens for member in self._members.values())
        member = self._members.get(run_id)
        return member.tokens / total if member is not None and total else 0.0
