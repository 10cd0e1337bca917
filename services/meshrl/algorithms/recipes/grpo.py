"""grpo: rl alone, with advantages that compare the rollouts of a task; the default."""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.algorithms.advantages import Advantage
from meshrl.algorithms.recipes.base import Recipe, Scores, Streams, by_agent, sampled_tokens, with_advantages
from meshrl.wire.types import Rollout


class GRPO(Recipe):
    """The family of GRPO (arXiv 2402.03300): Dr. GRPO, RLOO, OPO and the rest differ by `advantage`, any of
    `algorithms.advantages`, and by the trainer's loss."""

    def __init__(self, advantage: Advantage) -> None:
        self._advantage = advantage

    def streams(self, rollouts: Sequence[Rollout], scores: Scores) -> Streams:
        return with_advantages(rollouts, group_advantages(rollouts, self._advantage))


def group_advantages(rollouts: Sequence[Rollout], advantage: Advantage) -> dict[str, float]:
    """By rollout id, relative to the group's rollouts of the same agent."""
    result: dict[str, float] = {}
    for members in by_agent(rollouts).values():
        values = advantage(
            [rollout.reward for rollout in members], [max(1, sampled_tokens(rollout)) for rollout in members]
        )
        result |= {rollout.rollout_id: float(value) for rollout, value in zip(members, values, strict=True)}
    return result
