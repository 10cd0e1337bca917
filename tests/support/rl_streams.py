"""Rollouts of one sampled token, and the streams of groups that are trained by reward alone."""

from collections.abc import Sequence

import numpy as np

from meshrl.algorithms.advantages import Advantage
from meshrl.algorithms.recipes.base import Streams
from meshrl.algorithms.recipes.grpo import GRPO
from meshrl.sampling.groups import GroupTicket
from meshrl.wire.types import Rollout, Sample, VersionSpan


def rl_streams(groups: Sequence[Sequence[Rollout]], advantage: Advantage) -> Streams:
    recipe = GRPO(advantage)
    return {key: each for group in groups for key, each in recipe.streams(group, {}).items()}


def rollout_of(ticket: GroupTicket, place: int, reward: float, version: int) -> Rollout:
    """One of a group's, sampled by `version`."""
    sample = Sample(
        token_ids=np.array([1, 2], dtype=np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.zeros(2, dtype=np.float32),
        version_spans=(VersionSpan(start=1, end=2, version=version),),
    )
    return Rollout(
        rollout_id=f"{ticket.group_id}:{place}",
        group_id=ticket.group_id,
        task_key="t",
        environment=ticket.task.environment,
        samples=(sample,),
        reward=reward,
    )
