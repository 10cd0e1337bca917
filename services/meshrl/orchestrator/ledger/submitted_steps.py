"""The steps that the trainer has: kept here with what their records need, else read back from the journal."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.orchestrator.ledger.journal import Journal
from meshrl.orchestrator.metrics import StepTally
from meshrl.orchestrator.plan import ReadyGroup
from meshrl.orchestrator.work.batches import Assembled
from meshrl.wire.types import Batch


@dataclass(frozen=True, kw_only=True, eq=False)
class SubmittedStep:
    """A step that the trainer has, with what its record needs."""

    step: int
    groups: tuple[ReadyGroup, ...]
    assembled: Assembled
    tally: StepTally

    @property
    def lost(self) -> tuple[str, ...]:
        """Rollouts that are in the batch, and of which nothing else is kept: their payload in the ledger is damaged."""
        known = {rollout.rollout_id for ready in self.groups for rollout in ready.kept} | self.assembled.untrainable
        return tuple(rollout_id for rollout_id in self.assembled.advantages if rollout_id not in known)


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
