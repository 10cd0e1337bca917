"""Has the rollout services stop groups in flight that would come back too old to train on; told by the dispatcher."""

from __future__ import annotations

from collections.abc import Iterable

from loguru import logger

from meshrl.sampling.pool import RolloutPool
from meshrl.wire.errors import MeshError


class StaleGroups:
    """Each group is cancelled once; `has` says afterwards why it was cut short."""

    def __init__(self, pool: RolloutPool) -> None:
        self._pool = pool
        self._cancelled: set[str] = set()

    def has(self, group_id: str) -> bool:
        return group_id in self._cancelled

    def forget(self, group_id: str) -> None:
        """The group is over."""
        self._cancelled.discard(group_id)

    def not_yet_cancelled(self, group_ids: Iterable[str]) -> list[str]:
        """Those of the groups that nobody has cancelled yet; the caller does, with `cancel`."""
        fresh = [group_id for group_id in group_ids if group_id not in self._cancelled]
        self._cancelled.update(fresh)
        return fresh

    async def cancel(self, group_ids: list[str], *, step: int) -> None:
        """Tells the services that play them. A call that fails costs nothing but work."""
        try:
            cancelled = await self._pool.cancel(group_ids)
        except MeshError as error:  # not needed for correctness: they come back stale and are dropped
            logger.warning(f"could not cancel {len(group_ids)} groups that are too old: {error}")
        else:
            logger.info(f"cancelled {cancelled} rollouts in flight that would be too old for step {step}")
