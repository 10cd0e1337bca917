"""rae: rl alone, each agent against its own usual reward; for self-play."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshrl.algorithms.recipes.base import Recipe, Scores, Streams, with_advantages
from meshrl.wire.types import Rollout


class RoleBaseline(Recipe):
    """Role-conditioned advantage estimation (SPIRAL, arXiv 2506.24119): A = R - b of the rollout's agent.

    b, from 0, is a moving average over the agent's earlier rewards in this environment, b <- decay * b + (1 - decay) *
    R. In a zero-sum game the mean of a group is about 0 whatever the policy does, and the side that moves first may win
    more. Groups of one rollout and of equal rewards train as well.
    """

    least_rollouts = 1
    needs_signal = False

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._baselines: dict[str, float] = {}

    def streams(self, rollouts: Sequence[Rollout], scores: Scores) -> Streams:
        advantages: dict[str, float] = {}
        for rollout in rollouts:
            baseline = self._baselines.get(rollout.agent, 0.0)
            advantages[rollout.rollout_id] = rollout.reward - baseline
            self._baselines[rollout.agent] = self._decay * baseline + (1.0 - self._decay) * rollout.reward
        return with_advantages(rollouts, advantages)

    def state(self) -> Mapping[str, float]:
        return dict(self._baselines)

    def restore(self, state: Mapping[str, float]) -> None:
        self._baselines = dict(state)
