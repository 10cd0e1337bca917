"""Measures how many slots of the rollout services stand idle, and how many of them while a batch waits for groups.

The dispatcher reports when groups begin and end, the loop when it waits; a step's record takes the shares. The number
of slots is read from the services' pool at each of these moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SlotUse:
    """Adds up slot-seconds. `slots` are the rollouts that the services run at once; None until they report it."""

    def __init__(self, now: Callable[[], float], slots: Callable[[], int | None]) -> None:
        self._now = now
        self._ask = slots
        self._slots = slots()
        self._out: dict[str, int] = {}  # rollouts by group
        self._total_out = 0
        self._waiting = False
        self._since_s = now()
        self._all_s = self._idle_s = self._tail_s = 0.0

    @property
    def rollouts(self) -> int:
        """Rollouts that are out."""
        return self._total_out

    def begin(self, group_id: str, rollouts: int) -> None:
        """A group was sent to a rollout service."""
        self._add_up()
        self._out[group_id] = rollouts
        self._total_out += rollouts

    def rollout_ended(self, group_id: str) -> None:
        """A rollout of a group finished or failed."""
        if self._out.get(group_id, 0) > 0:
            self._add_up()
            self._out[group_id] -= 1
            self._total_out -= 1

    def end(self, group_id: str) -> None:
        """A group is over, whatever became of its rollouts."""
        self._add_up()
        self._total_out -= self._out.pop(group_id, 0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While a batch waits for its last groups."""
        self._add_up()
        self._waiting = True
        try:
            yield
        finally:
            self._add_up()
            self._waiting = False

    def idle_shares(self) -> tuple[float, float] | None:
        """Shares of the slot-seconds since the last call: idle, and idle while a batch waited; None where not known."""
        self._add_up()
        whole, idle, tail = self._all_s, self._idle_s, self._tail_s
        self._all_s = self._idle_s = self._tail_s = 0.0
        return (idle / whole, tail / whole) if whole > 0.0 else None

    def _add_up(self) -> None:
        now_s = self._now()
        passed_s, self._since_s = now_s - self._since_s, now_s
        slots, self._slots = self._slots, self._ask()
        if slots is None:
            return
        idle_s = passed_s * max(0, slots - self._total_out)
        self._all_s += passed_s * slots
        self._idle_s += idle_s
        self._tail_s += idle_s if self._waiting else 0.0
