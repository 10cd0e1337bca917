"""Groups in flight that would come back too old to train on: told to the rollout service, so that it stops them."""

from __future__ import annotations

from loguru import logger

from meshrl.client import RolloutClient
from meshrl.orchestrator.plan import WorkPlan
from meshrl.wire.errors import MeshError


class StaleGroups:
    """Each is told once; the loop asks `has` why a group was cancelled."""

    def __init__(self, plan: WorkPlan, client: RolloutClient) -> None:
        self._plan = plan
        self._client = client
        self._told: set[str] = set()

    def has(self, group_id: str) -> bool:
        return group_id in self._told

    def forget(self, group_id: str) -> None:
        """The group is over."""
        self._told.discard(group_id)

    def take(self) -> list[str]:
        """Those that have not been told yet: `cancel` them."""
        fresh = [group_id for group_id in self._plan.doomed() if group_id not in self._told]
        self._told.update(fresh)
        return fresh

    async def cancel(self, group_ids: list[str]) -> None:
        try:
            cancelled = await self._client.cancel_rollouts(group_ids)
        except MeshError as error:  # not needed for correctness: they come back stale and are dropped
            logger.warning(f"could not cancel {len(group_ids)} groups that are too old: {error}")
        else:
            step = self._plan.next_step
            logger.info(f"cancelled {cancelled} rollouts in flight that would be too old for step {step}")
