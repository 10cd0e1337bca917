"""hierarchical_grpo: rl alone, for episodes in which one agent poses what several runs of another solve."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshrl.algorithms.advantages import Advantage
from meshrl.algorithms.recipes.base import Recipe, Scores, Streams, with_advantages
from meshrl.algorithms.recipes.grpo import group_advantages
from meshrl.wire.types import Rollout


class HierarchicalGRPO(Recipe):
    """Agents of `episode_agents` (the solvers) are compared within an episode, since another poses another problem; all
    others (the proposer) across episodes. A rollout alone has advantage 0."""

    least_rollouts = 1

    def __init__(self, advantage: Advantage, *, episode_agents: Collection[str]) -> None:
        self._advantage = advantage
        self._episode_agents = frozenset(episode_agents)

    def streams(self, rollouts: Sequence[Rollout], scores: Scores) -> Streams:
        """Raises ValueError for a rollout of an episode agent without an episode."""
        levels: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            within = rollout.agent in self._episode_agents
            if within and not rollout.episode_id:
                raise ValueError(
                    f"hierarchical_grpo compares the rollouts of agent {rollout.agent!r} within an episode, but those"
                    f" of {rollout.environment!r} name none; the rollout service must set Rollout.episode_id"
                )
            levels.setdefault(rollout.episode_id if within else "", []).append(rollout)
        advantages: dict[str, float] = {}
        for members in levels.values():
            advantages |= group_advantages(members, self._advantage)
        return with_advantages(rollouts, advantages)
