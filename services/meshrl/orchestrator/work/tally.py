"""Counts what becomes of rollouts, since the step before and since the run began; read by records and ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshrl.orchestrator.work.screening import DropReason, ReadyGroup
from meshrl.sampling.groups import RolloutGroup


@dataclass(kw_only=True)
class StepTally:
    """What was judged since the step before was taken."""

    discarded: list[RolloutGroup] = field(default_factory=list)
    zero_signal_groups: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    wait_for_rollouts_s: float = 0.0
    wait_for_ckpt_s: float = 0.0
    sleep_engines_s: float | None = None  # None: they were not asked to
    idle_slots: tuple[float, float] | None = None  # shares: idle, and idle while the batch waited; None: not known

    def drop(self, reason: DropReason) -> None:
        self.dropped[reason.value] += 1

    def take_back(self, of_step: StepTally) -> None:
        """Adds what was judged for a step whose batch was taken apart."""
        self.discarded[:0] = of_step.discarded
        self.zero_signal_groups += of_step.zero_signal_groups
        self.dropped.update(of_step.dropped)
        self.wait_for_rollouts_s += of_step.wait_for_rollouts_s
        self.wait_for_ckpt_s += of_step.wait_for_ckpt_s


@dataclass(frozen=True, kw_only=True)
class RunTotals:
    """Totals since the start of the run."""

    tokens: int = 0
    samples: int = 0
    problems: int = 0

    def plus(self, groups: Sequence[ReadyGroup]) -> RunTotals:
        rollouts = [rollout for ready in groups for rollout in ready.kept]
        return RunTotals(
            tokens=self.tokens + sum(rollout.num_tokens for rollout in rollouts),
            samples=self.samples + len(rollouts),
            problems=self.problems + len(groups),
        )
