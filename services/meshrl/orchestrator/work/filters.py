"""Which rollouts of a whole group carry a gradient, and which of a ready group are still fresh; asked by the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from meshrl.orchestrator.work.rollout_groups import DropReason, Screened, with_survivors
from meshrl.orchestrator.work.staleness import StalenessLaw
from meshrl.wire.types import Rollout


def screen_finished(
    rollouts: Sequence[Rollout], *, drop_empty: bool, drop_zero_signal: bool, tolerance: float
) -> Screened:
    """Judges a whole group: losses first, then whether what is left says anything.

    Rewards are compared among rollouts of the same agent, as advantages are.
    """
    kept: list[Rollout] = []
    dropped: list[tuple[Rollout, DropReason]] = []
    for rollout in rollouts:
        if not math.isfinite(rollout.reward):
            dropped.append((rollout, DropReason.NOT_FINITE))
        elif drop_empty and is_empty(rollout):
            dropped.append((rollout, DropReason.EMPTY))
        else:
            kept.append(rollout)
    screened = with_survivors(kept, dropped)
    if drop_zero_signal and screened.kept and has_zero_signal(screened.kept, tolerance):
        silent = [(rollout, DropReason.ZERO_SIGNAL) for rollout in screened.kept]
        return Screened(kept=(), dropped=(*screened.dropped, *silent))
    return screened


def screen_stale(rollouts: Sequence[Rollout], *, step: int, law: StalenessLaw) -> Screened:
    """Drops what `step` may not train on any more."""
    kept = [rollout for rollout in rollouts if is_usable(rollout, step=step, law=law)]
    stale = [(rollout, DropReason.STALE) for rollout in rollouts if not is_usable(rollout, step=step, law=law)]
    return with_survivors(kept, stale)


def is_usable(rollout: Rollout, *, step: int, law: StalenessLaw) -> bool:
    oldest = rollout.oldest_version
    return oldest is None or law.usable(step=step, oldest_version=oldest)


def is_empty(rollout: Rollout) -> bool:
    """True when the policy sampled no token."""
    return not any(sample.loss_mask.any() for sample in rollout.samples)


def has_zero_signal(rollouts: Iterable[Rollout], tolerance: float) -> bool:
    """True when no agent's rewards differ by more than `tolerance`."""
    return all(
        max(rewards) - min(rewards) <= tolerance
        for rewards in ([rollout.reward for rollout in group] for group in by_agent(rollouts).values())
    )


def by_agent(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    agents: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        agents.setdefault(rollout.agent, []).append(rollout)
    return agents
