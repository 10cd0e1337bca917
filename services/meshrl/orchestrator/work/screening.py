"""Judges groups of rollouts that are over: which rollouts carry a gradient."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshrl.algorithms.recipes.base import by_agent
from meshrl.sampling.groups import RolloutGroup
from meshrl.wire.types import Rollout


class DropReason(enum.Enum):
    """Why a finished rollout was not trained on; the words of the ledger and of the `dropped/...` metrics."""

    EMPTY = "empty"
    """The policy sampled no token."""
    NOT_FINITE = "reward_not_finite"
    GROUP_LOST = "group_lost"
    """Fewer of its group are left than its algorithm needs."""
    ZERO_SIGNAL = "zero_signal"
    """All rewards of its group are equal."""
    STALE = "stale"
    """Its oldest token is older than the law allows."""
    REFUSED = "refused_by_trainer"
    """The trainer refused a batch because of it."""
    UNTRAINABLE = "untrainable"
    """It has no token that its algorithm trains, or none within the token budget."""
    RUN_ENDED = "run_ended"
    RESTARTED = "orchestrator_restarted"
    """It was in flight when the orchestrator ended."""
    UNDONE = "step_undone"
    """The trainer forgot its step, and its payload is gone."""
    DAMAGED = "payload_damaged"
    """Its ledger entry is damaged."""
    REMOVED = "environment_removed"
    SUPERSEDED = "superseded"
    """Another run began in its folder."""


@dataclass(frozen=True, kw_only=True)
class Screened:
    """The rollouts of a group that may be trained on, and the others."""

    kept: tuple[Rollout, ...]
    dropped: tuple[tuple[Rollout, DropReason], ...]

    @property
    def zero_signal(self) -> bool:
        return any(reason is DropReason.ZERO_SIGNAL for _, reason in self.dropped)


def with_survivors(kept: Sequence[Rollout], dropped: Sequence[tuple[Rollout, DropReason]], *, least: int) -> Screened:
    """Drops the survivors too when their algorithm needs more."""
    if len(kept) >= least:
        return Screened(kept=tuple(kept), dropped=tuple(dropped))
    lost = [(rollout, DropReason.GROUP_LOST) for rollout in kept]
    return Screened(kept=(), dropped=(*dropped, *lost))


def screen_finished(
    rollouts: Sequence[Rollout], *, drop_empty: bool, drop_zero_signal: bool, tolerance: float, least: int
) -> Screened:
    """First drops unusable rollouts, of which `least` must be left, then groups without signal."""
    kept: list[Rollout] = []
    dropped: list[tuple[Rollout, DropReason]] = []
    for rollout in rollouts:
        if not math.isfinite(rollout.reward):
            dropped.append((rollout, DropReason.NOT_FINITE))
        elif drop_empty and is_empty(rollout):
            dropped.append((rollout, DropReason.EMPTY))
        else:
            kept.append(rollout)
    screened = with_survivors(kept, dropped, least=least)
    if drop_zero_signal and screened.kept and has_zero_signal(screened.kept, tolerance):
        silent = [(rollout, DropReason.ZERO_SIGNAL) for rollout in screened.kept]
        return Screened(kept=(), dropped=(*screened.dropped, *silent))
    return screened


def is_empty(rollout: Rollout) -> bool:
    return not any(sample.loss_mask.any() for sample in rollout.samples)


def has_zero_signal(rollouts: Iterable[Rollout], tolerance: float) -> bool:
    """True when no agent's rewards differ by more than `tolerance`."""
    return all(
        max(rewards) - min(rewards) <= tolerance
        for rewards in ([rollout.reward for rollout in group] for group in by_agent(rollouts).values())
    )


WAITS = ("time/wait_for_rollouts", "time/wait_for_ckpt")
"""Each step's record has these seconds; others where there were any."""


@dataclass(kw_only=True)
class StepTally:
    discarded: list[RolloutGroup] = field(default_factory=list)
    zero_signal_groups: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WAITS, 0.0))
    """By metric."""
    idle_shares: dict[str, float] = field(default_factory=dict)  # metrics

    def drop(self, reason: DropReason) -> None:
        self.dropped[reason.value] += 1

    def wait(self, metric: str, seconds: float) -> None:
        self.seconds[metric] = self.seconds.get(metric, 0.0) + seconds

    def take_back(self, of_step: StepTally) -> None:
        self.discarded[:0] = of_step.discarded
        self.zero_signal_groups += of_step.zero_signal_groups
        self.dropped.update(of_step.dropped)
        for metric, seconds in of_step.seconds.items():
            self.wait(metric, seconds)


@dataclass(frozen=True, kw_only=True)
class RunTotals:
    tokens: int = 0
    samples: int = 0
    problems: int = 0

    def plus(self, groups: Sequence[RolloutGroup]) -> RunTotals:
        rollouts = [rollout for group in groups for rollout in group.kept]
        return RunTotals(
            tokens=self.tokens + sum(rollout.num_tokens for rollout in rollouts),
            samples=self.samples + len(rollouts),
            problems=self.problems + len(groups),
        )
