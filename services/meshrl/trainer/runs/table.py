"""The runs that a trainer trains, found by run_id; TrainerService looks a run up here for each request.

A trainer holds one run in this version, its own, so the table is a dictionary with one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NoReturn

from meshrl.trainer.publishing.publisher import PublishReport
from meshrl.trainer.runs.work_queue import TrainingQueue
from meshrl.training.checkpoints.checkpointer import Checkpointer
from meshrl.training.learner import Learner
from meshrl.training.run_state import RunState
from meshrl.versions.progress import Progress
from meshrl.versions.snapshot import Captured
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import RunInfo


@dataclass(frozen=True, kw_only=True)
class RunVersions:
    """How the versions of a run leave the trainer."""

    capture: Callable[[int], Captured]
    """Copies the weights of a version aside; collective, on the training thread between two steps."""

    publish: Callable[[int, Captured, str], Future[PublishReport]]
    """(version, what `capture` returned, traceparent) -> a future that is done when the version is published."""

    progress: Progress
    """When the publication under way last moved."""

    stall_s: float
    """Seconds for which a publication may stand still."""


@dataclass(kw_only=True, eq=False)
class TrainerRun:
    """All that belongs to one run: its steps, its state, its checkpoints, and its versions."""

    queue: TrainingQueue  # with the run's step book
    state: RunState
    learner: Learner  # which trains it
    checkpointer: Checkpointer
    versions: RunVersions | None = None  # None until publishing is set up, before the first step

    @property
    def run_id(self) -> str:
        return self.queue.book.run_id

    def info(self) -> RunInfo:
        """The run as GetTrainer and ListRuns return it."""
        return self.queue.book.info()


class RunTable:
    """The runs of one trainer by run_id. The first one is the trainer's own, which an empty id means."""

    def __init__(self, own: TrainerRun, *, max_runs: int = 1) -> None:
        self._own = own
        self._runs = {own.run_id: own}
        self._max_runs = max_runs

    def __iter__(self) -> Iterator[TrainerRun]:
        return iter(self._runs.values())

    def find(self, run_id: str) -> TrainerRun:
        """Raises MeshError UNKNOWN_RUN for a run that is not here."""
        run = self._runs.get(run_id or self._own.run_id)
        if run is None:
            held = ", ".join(map(repr, self._runs))
            raise MeshError(Reason.UNKNOWN_RUN, f"no run {run_id!r} here; this trainer holds {held}")
        return run

    def create(self, run_id: str) -> NoReturn:
        """Raises MeshError RUN_EXISTS or RUN_LIMIT_REACHED: this version has no room for a second run."""
        own = self._own.run_id
        if run_id in self._runs:
            raise MeshError(Reason.RUN_EXISTS, f"run {own!r} is this trainer's own; choose another run_id")
        raise MeshError(
            Reason.RUN_LIMIT_REACHED,
            f"this trainer holds {self._max_runs} run(s), its own {own!r} included, and takes no more; start another "
            "trainer",
        )

    def delete(self, run_id: str) -> NoReturn:
        """Raises MeshError UNKNOWN_RUN, or RUN_PROTECTED for the trainer's own run."""
        run = self.find(run_id)
        raise MeshError(Reason.RUN_PROTECTED, f"run {run.run_id!r} is this trainer's own; use Drain to end it")
