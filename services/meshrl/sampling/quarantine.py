"""When a rollout service is left out because its groups fail; one for each of its environments, told by the pool."""

from __future__ import annotations

from dataclasses import dataclass

GROUPS_IN_A_ROW = 3
FIRST_S = 30.0
MOST_S = 960.0


@dataclass
class Quarantine:
    """Groups that failed or timed out in a row, and until when that leaves the service out.

    Each time is twice as long as the one before; a group that came back well ends the count, and the doubling.
    """

    until_s: float = 0.0
    in_a_row: int = 0
    times: int = 0

    def group_failed(self, now_s: float) -> float:
        """A group brought nothing but failures, or timed out; returns for how long the service is left out, or 0.

        After a time in quarantine one such group is enough for the next.
        """
        self.in_a_row += 1
        if self.until_s > now_s or self.in_a_row < (1 if self.times else GROUPS_IN_A_ROW):
            return 0.0
        lasts_s = min(FIRST_S * 2.0**self.times, MOST_S)
        self.until_s, self.in_a_row, self.times = now_s + lasts_s, 0, self.times + 1
        return lasts_s

    def group_went_well(self) -> None:
        """A rollout of a group finished."""
        self.in_a_row = self.times = 0
