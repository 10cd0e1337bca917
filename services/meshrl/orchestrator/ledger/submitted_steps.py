"""The steps that the trainer has: kept here with what their records need, else read back from the journal."""

from __future__ import annotations

from meshrl.orchestrator.ledger.journal import Journal
from meshrl.orchestrator.work.batches import SubmittedStep
from meshrl.orchestrator.work.tally import StepTally
from meshrl.wire.types import Batch


class SubmittedSteps:
    """Those of this process are in memory; those of an earlier one, or done before, are on disk."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._here: dict[int, SubmittedStep] = {}

    def add(self, submitted: SubmittedStep) -> None:
        self._here[submitted.step] = submitted

    async def batch(self, step: int) -> Batch:
        """Raises RunError when it is not kept."""
        known = self._here.get(step)
        return known.assembled.batch if known is not None else await self._journal.load_batch(step)

    async def take(self, step: int) -> SubmittedStep:
        """Hands a step out; it is not kept here any more. Raises RunError when it is not kept on disk either."""
        if (known := self._here.pop(step, None)) is not None:
            return known
        groups, assembled = await self._journal.load_step(step)
        return SubmittedStep(step=step, groups=groups, assembled=assembled, tally=StepTally())
