"""A run's step on every rank: the batch passed a slice at a time, then the optimizer's step.

A slice has one row of each group of ranks that trains rows of its own. Slices of several runs may share a pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from loguru import logger

from meshrl.algorithms.objective import count
from meshrl.training.learner import Learner, RunRows, StepError, StepResult, UpdateError
from meshrl.training.run_state import RunState
from meshrl.wire.types import MicroBatch

Outcome = StepResult | StepError | UpdateError | None


class BatchStep:
    """A batch's step on one rank. Other runs may have their turn between two slices, while the gradient waits."""

    def __init__(self, run: RunState, micro_batches: Sequence[MicroBatch]) -> None:
        self.run = run
        self.passes: list[list[int]] = []  # rows by pass, as indices of the micro-batches
        self._rows = micro_batches
        self._counts = count(micro_batches)
        self._left = slices_of(micro_batches)

    @property
    def slices_left(self) -> int:
        return len(self._left)

    def next_rows(self) -> list[MicroBatch]:
        """The rows of the next slice."""
        return [self._rows[row] for row in self._left[0]]

    def take(self, slices: int) -> RunRows:
        """Takes the next slices, to be passed."""
        rows = sorted(row for each in self._left[:slices] for row in each)
        del self._left[:slices]
        self.passes.append(rows)
        return RunRows(run=self.run, micro_batches=[self._rows[row] for row in rows], counts=self._counts)


def pass_slices(learner: Learner, steps: Sequence[BatchStep], slices: int = 1) -> list[Outcome]:
    """Passes the next slices of the steps together, and makes those that they complete; None while slices are left.

    A shared pass that fails is repeated with each step by itself, so that only the one at fault fails.
    """
    taken, together = [step.take(slices) for step in steps], False
    if len(steps) > 1:
        try:
            learner.pass_rows(taken)
            together = True
        except StepError as error:
            logger.warning("rows of {} runs are passed one after the other: {}", len(steps), error)
    made: list[Outcome] = []
    for step, rows in zip(steps, taken, strict=True):
        try:
            if not together:
                learner.pass_rows([rows])
            made.append(None if step.slices_left else learner.optim_step(step.run))
        except (StepError, UpdateError) as error:
            made.append(error)
    return made


def slices_of(micro_batches: Sequence[MicroBatch]) -> list[list[int]]:
    """The rows of each slice, as indices."""
    seen: Counter[int] = Counter()
    slices: defaultdict[int, list[int]] = defaultdict(list)
    for row, micro_batch in enumerate(micro_batches):
        slices[seen[micro_batch.dp_rank]].append(row)
        seen[micro_batch.dp_rank] += 1
    return list(slices.values())
