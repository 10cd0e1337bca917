"""Decides whose code lost or blocked a worker, and which of its rollouts are played again. No I/O.

The rollout that did it fails. One of another environment is played again until its group's deadline. One of the same
environment, or of any if the cause is unknown, may be the next to do it, so its losses are counted.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

NO_ROLLOUT = ""
"""Code of an environment outside of its rollouts."""

MOST_TRIES = 3


class Fault(enum.Enum):
    OWN = "own"
    OTHERS = "others"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Culprit:
    """An empty name is an unknown environment, NO_ROLLOUT an unknown rollout."""

    environment: str = ""
    rollout: str = NO_ROLLOUT

    def fault_of(self, environment: str, rollout: str, busy: Collection[str]) -> Fault:
        """The fault of a rollout of `environment`; `busy` are the environments that the worker played. If only an
        environment is known, as with memory, its rollouts did it themselves."""
        suspect = self.environment or (next(iter(busy)) if len(busy) == 1 else "")
        if not suspect:
            return Fault.UNKNOWN
        if environment != suspect:
            return Fault.OTHERS
        return Fault.OWN if self.rollout in (NO_ROLLOUT, rollout) else Fault.UNKNOWN


NOBODY = Culprit()


class Tries:
    """Counts losses, but for those by another environment."""

    def __init__(self) -> None:
        self._lost = 0

    def again(self, fault: Fault) -> bool:
        self._lost += fault is Fault.UNKNOWN
        return fault is not Fault.OWN and self._lost < MOST_TRIES
