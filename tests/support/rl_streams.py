"""The streams of groups that are trained by reward alone: what the algorithm grpo says of them."""

from collections.abc import Sequence

from meshrl.algorithms.advantages import Advantage
from meshrl.algorithms.recipes.base import Streams
from meshrl.algorithms.recipes.grpo import GRPO
from meshrl.wire.types import Rollout


def rl_streams(groups: Sequence[Sequence[Rollout]], advantage: Advantage) -> Streams:
    recipe = GRPO(advantage)
    return {key: each for group in groups for key, each in recipe.streams(group, {}).items()}
