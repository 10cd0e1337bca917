"""Waits after groups that were lost to failures, and ends the run after too many in a row; used by the dispatcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loguru import logger

from meshrl.client.backoff import Backoff
from meshrl.core.clock import Clock
from meshrl.sampling.groups import RolloutGroup
from meshrl.sampling.retry import AWAY, RunError
from meshrl.wire.errors import Reason

_AWAY = frozenset(reason.name for reason in (Reason.ENGINE_FAILED, *AWAY))
"""What groups fail with while an engine or the rollout service is started again."""

WAIT_S = (0.02, 2.0)
"""After the first lost group, and at most."""


class LostGroups:
    """Counts the groups in a row that failures have left with fewer rollouts than their algorithm needs."""

    def __init__(
        self,
        least_rollouts: Mapping[str, int],
        *,
        most_in_a_row: int,
        unreachable_s: float,
        services: Sequence[str],
        clock: Clock,
    ) -> None:
        """`least_rollouts`: what an algorithm needs, by environment; `services`: addresses, for the error."""
        self._least = least_rollouts
        self._most = most_in_a_row
        self._unreachable_s = unreachable_s
        self._services = services
        self._clock = clock
        self._backoff = Backoff(*WAIT_S, jitter=0.0)
        self._in_a_row = 0
        self._since_s = 0.0

    async def judge(self, group: RolloutGroup) -> None:
        """After a lost group: waits, longer each time in a row.

        Raises RunError after too many; while an engine or the service is away, only once it has had `unreachable_s`.
        """
        if len(group.rollouts) >= self._least[group.ticket.task.environment] or not group.errors:
            self._in_a_row = 0
            self._backoff.reset()
            return
        if not self._in_a_row:
            self._since_s = self._clock.now()
        self._in_a_row += 1
        last = group.failures[-1] if group.failures else None
        why = f"{last.reason}: {last.message}" if last else group.cut_short
        away = (last.reason if last else group.cut_short) in _AWAY
        may_come_back = away and self._clock.now() - self._since_s < self._unreachable_s
        if self._in_a_row >= self._most and not may_come_back:
            raise RunError(
                f"{self._in_a_row} groups in a row were lost to failures, last in"
                f" {group.ticket.task.environment!r} with {why}; see the log of the rollout service at"
                f" {' or '.join(self._services)}"
            )
        logger.warning(f"group {group.ticket.group_id} of {group.ticket.task.environment} is lost: {why}")
        await self._clock.sleep(self._backoff.next_s())
