"""A step of a run as every rank makes it: the rows of its batch passed a slice at a time, then the optimizer's step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from meshrl.algorithms.objective import count
from meshrl.training.learner import Learner, StepResult
from meshrl.training.run_state import RunState
from meshrl.wire.types import Batch, MicroBatch


class BatchStep:
    """The step that a batch makes. Every rank has one, and calls `advance` alike.

    A slice has one row of each group of ranks that trains rows of its own, so other runs may have their turn between
    two slices; the run's gradient waits where it is.
    """

    def __init__(self, learner: Learner, run: RunState, batch: Batch) -> None:
        self.batch = batch
        self.passes: list[list[int]] = []  # rows by pass, as indices of the batch's micro-batches
        self._learner, self._run = learner, run
        self._counts = count(batch.micro_batches)
        self._left = slices_of(batch.micro_batches)

    @property
    def slices_left(self) -> int:
        return len(self._left)

    def next_tokens(self) -> int:
        """Tokens of the next slice's rows."""
        return sum(len(self.batch.micro_batches[row].token_ids) for row in self._left[0])

    def advance(self, slices: int) -> StepResult | None:
        """Passes the next slices; with the last of them it makes the step. Raises StepError and UpdateError."""
        rows = sorted(row for each in self._left[:slices] for row in each)
        del self._left[:slices]
        self.passes.append(rows)
        self._learner.forward_backward(self._run, [self.batch.micro_batches[row] for row in rows], self._counts)
        return None if self._left else self._learner.optim_step(self._run)


def slices_of(micro_batches: Sequence[MicroBatch]) -> list[list[int]]:
    """The rows of each slice: the first of every group of ranks, then the second, and so on."""
    seen: Counter[int] = Counter()
    slices: defaultdict[int, list[int]] = defaultdict(list)
    for row, micro_batch in enumerate(micro_batches):
        slices[seen[micro_batch.dp_rank]].append(row)
        seen[micro_batch.dp_rank] += 1
    return list(slices.values())
