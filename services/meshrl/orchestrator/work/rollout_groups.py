"""One group of rollouts from dispatch to verdict; fed with the events of RunRollouts, read by the plan of work."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.wire.types import Rollout

MIN_SURVIVORS = 2
"""A group needs two rollouts to compare; with fewer it has no baseline and is dropped."""


class DropReason(enum.Enum):
    """Why a finished rollout was not trained on; the words of the ledger and of the `dropped/...` metrics."""

    EMPTY = "empty"
    """The policy sampled no token."""
    NOT_FINITE = "reward_not_finite"
    """The reward is NaN or infinite."""
    GROUP_LOST = "group_lost"
    """Fewer than two rollouts of its group are left."""
    ZERO_SIGNAL = "zero_signal"
    """All rewards of its group are equal."""
    STALE = "stale"
    """Its oldest token is older than the law allows."""
    REFUSED = "refused_by_trainer"
    """The trainer refused a batch because of it."""
    UNTRAINABLE = "untrainable"
    """No sampled token fits into the token budget."""
    RUN_ENDED = "run_ended"
    """The run ended before a step took it."""
    RESTARTED = "orchestrator_restarted"
    """It was in flight when the orchestrator ended; nothing that had come back is dropped for it."""
    UNDONE = "step_undone"
    """Its step was forgotten by the trainer, and it is not kept any more."""
    DAMAGED = "payload_damaged"
    """What the ledger keeps of it is not as it was written."""
    REMOVED = "environment_removed"
    """Its environment is no longer one of the run's."""
    SUPERSEDED = "superseded"
    """Another run began in its folder."""


@dataclass(frozen=True, kw_only=True)
class Screened:
    """The rollouts of a group that may be trained on, and those dropped with the reason."""

    kept: tuple[Rollout, ...]
    dropped: tuple[tuple[Rollout, DropReason], ...]


def with_survivors(kept: Sequence[Rollout], dropped: Sequence[tuple[Rollout, DropReason]]) -> Screened:
    """Drops those left when they are too few to compare: a group survives losses with at least two rollouts."""
    if len(kept) >= MIN_SURVIVORS:
        return Screened(kept=tuple(kept), dropped=tuple(dropped))
    lost = [(rollout, DropReason.GROUP_LOST) for rollout in kept]
    return Screened(kept=(), dropped=(*dropped, *lost))
