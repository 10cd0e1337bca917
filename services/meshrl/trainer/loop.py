"""The training loop of rank 0: gives the runs their turns, a slice at a time; runs on the training thread.

Consumes batches of each run, in order. Produces a snapshot of a run's weights for its publisher, and a DONE or FAILED
event a step (`run_training`). Waits for batches, for checkpoints that clients ask for and, before it captures a version
of a run, for the publication of the one before; meanwhile other runs train. Unblocks the orchestrators, which activate
a version once its step is DONE.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from meshrl.core.telemetry.waits import Waits
from meshrl.trainer.ranks.commands import CommandSender, StopCommand
from meshrl.trainer.run_training import RunTraining
from meshrl.trainer.runs.scheduler import FairScheduler
from meshrl.trainer.runs.table import RunTable, Taken
from meshrl.trainer.runs.work_queue import SaveRequest


@dataclass(frozen=True, kw_only=True)
class Joining:
    """Slices whose longest row has fewer tokens than `below` share a pass, of `room` tokens at most on each rank."""

    below: int
    room: int


class TrainerLoop:
    """Trains the runs of a table until the queue of its own run is closed."""

    def __init__(
        self,
        table: RunTable,
        runs: Sequence[RunTraining],
        commands: CommandSender,
        *,
        quantum_tokens: int | None = None,
        joining: Joining | None = None,
        waits: Waits | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`quantum_tokens` of a turn; None: whole batches, for a trainer of one run. `joining` None: a pass has rows of
        one run. `on_end` is called after the last collective."""
        self._table, self._commands, self._waits = table, commands, waits or Waits()
        self._runs: dict[str, RunTraining] = {}
        self._scheduler = FairScheduler(quantum_tokens or 1)
        self._whole_batches, self._joining = quantum_tokens is None, joining
        self._on_end = on_end
        for run in runs:
            self.add(run)

    def add(self, run: RunTraining, share: float = 1.0) -> None:
        self._runs[run.state.run_id] = run
        self._scheduler.add(run.state.run_id, share)

    def remove(self, run_id: str) -> bool:
        """Trains a run no more, which has no step at hand; returns whether it did."""
        if found := run_id in self._runs:
            self._scheduler.remove(run_id)
            del self._runs[run_id]
        return found

    def used_share(self, run_id: str) -> float:
        """Of the tokens trained by the runs that are here, those of this one."""
        return self._scheduler.used_share(run_id)

    def run(self) -> None:
        """Works until the queues close, then writes the last checkpoints. Raises what the trainer cannot survive."""
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
        run_id = self._scheduler.next_run(ready)
        if run_id is None:
            return
        run = self._runs[run_id]
        beside = self._beside(run, ready)
        with self._waits.waiting("step", f"its own work on step {run.state.next_step}"):
            run.advance(run.slices_left if self._whole_batches else 1, beside)
        for each in (run, *beside):
            self._scheduler.charge(each.state.run_id, ready[each.state.run_id])

    def _beside(self, run: RunTraining, ready: Container[str]) -> list[RunTraining]:
        if self._joining is None or self._whole_batches or (first := run.joinable) is None:
            return []
        longest, alike = first
        room, beside = self._joining.room - longest, []
        if longest >= self._joining.below:
            return []
        for other in (self._runs[run_id] for run_id in self._scheduler.ring if run_id in ready):
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
        publishing = [run for run in self._runs.values() if not run.idle]
        name, on = ("publication", ("weights",)) if publishing else ("batch", ("orchestrator",))
        words = " or ".join(
            f"version {run.state.step_done - 1} to be taken by the weight hub"
            if publishing
            else f"batch {run.state.next_step}"
            for run in publishing or self._runs.values()
        )
        with self._waits.waiting(name, words, on):
            future = self._table.take(idle, wait=True, until=lambda: any(r.tokens is not None for r in publishing))
            return self._commands.wait(future, check=self._check_publications)

    def _check_publications(self) -> float:
        """Seconds until one of them may have stood still for too long."""
        for run in self._runs.values():
            run.check_publication()
        return min((run.publication_left_s() for run in self._runs.values()), default=float("inf"))
