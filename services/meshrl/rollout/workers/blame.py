"""Decides whose doing it was that a worker was lost or left, and which of its rollouts are played again. No I/O.

Used by the fleet of workers. The rollout that did it fails. A rollout beside it that belongs to another environment is
played again as often as it takes, until the deadline of its group. One of the same environment, or of any environment
where nobody knows who did it, may be the next to do it, so its losses are counted.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

NO_ROLLOUT = ""
"""Code of an environment that belongs to none of its rollouts."""

MOST_TRIES = 3


class Fault(enum.Enum):
    OWN = "own"
    OTHERS = "others"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Culprit:
    """Whose code it was: `environment` "" and `rollout`, the id of its call, NO_ROLLOUT where that is not known."""

    environment: str = ""
    rollout: str = NO_ROLLOUT

    def fault_of(self, environment: str, rollout: str, busy: Collection[str]) -> Fault:
        """Whose doing it was, for a rollout of `environment`; `busy` are the environments that the worker played. What
        is known of one environment alone is its own doing, as with memory, which belongs to no rollout."""
        suspect = self.environment or (next(iter(busy)) if len(busy) == 1 else "")
        if not suspect:
            return Fault.UNKNOWN
        if environment != suspect:
            return Fault.OTHERS
        return Fault.OWN if self.rollout in (NO_ROLLOUT, rollout) else Fault.UNKNOWN


NOBODY = Culprit()


class Tries:
    """How often a rollout has been tried, with losses that are another environment's doing left out."""

    def __init__(self) -> None:
        self._lost = 0

    def again(self, fault: Fault) -> bool:
        self._lost += fault is Fault.UNKNOWN
        return fault is not Fault.OWN and self._lost < MOST_TRIES
