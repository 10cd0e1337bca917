"""Makes the algorithm of each training environment from the configuration, and asks it for the tokens that a step
trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from meshrl.algorithms.advantages import (
    ADVANTAGES,
    Advantage,
    load_custom_advantage,
    penalise_length,
    per_token_penalty,
    soft_overlong_penalty,
)
from meshrl.algorithms.recipes.base import Actor, Recipe, SampleStreams, Scores
from meshrl.algorithms.recipes.custom import check_streams, load_recipe
from meshrl.algorithms.recipes.echo import Echo
from meshrl.algorithms.recipes.grpo import GroupRelative
from meshrl.algorithms.recipes.hierarchical_grpo import HierarchicalGroupRelative
from meshrl.algorithms.recipes.max_rl import MaxRL
from meshrl.algorithms.recipes.opd import OnPolicyDistillation
from meshrl.algorithms.recipes.opsd import SelfDistillation
from meshrl.algorithms.recipes.rae import RoleBaseline
from meshrl.algorithms.recipes.sft import Imitation
from meshrl.orchestrator.config import AdvantageConfig, AlgoConfig
from meshrl.sampling.retry import RunError
from meshrl.wire.types import Rollout

ECHO_WEIGHT = 0.1

AlgorithmState = Mapping[str, Mapping[str, float]]
"""What the algorithms remember from step to step, by environment."""


class Recipes:
    def __init__(self, algos: Mapping[str, AlgoConfig], of_rewards: AdvantageConfig, *, seq_len: int) -> None:
        """From the configured algorithm of each environment. Raises RunError for a custom one that cannot be made."""
        self.by_environment = {name: _build_recipe(algo, of_rewards, seq_len) for name, algo in algos.items()}
        for name, recipe in self.by_environment.items():
            if recipe.sampler is Actor.TEACHER and algos[name].type != "sft":
                raise RunError(
                    f"the custom algorithm of environment {name!r} wants a teacher to play its rollouts, which only the"
                    " algorithm sft has"
                )

    @property
    def least_rollouts(self) -> dict[str, int]:
        """The fewest rollouts that a group must have left, by environment."""
        return {name: recipe.least_rollouts for name, recipe in self.by_environment.items()}

    def streams(self, groups: Sequence[Sequence[Rollout]], scores: Scores) -> dict[str, tuple[SampleStreams, ...]]:
        """What each sample of a step trains, by rollout id. Raises RunError where an algorithm cannot be used."""
        made: dict[str, tuple[SampleStreams, ...]] = {}
        for group in groups:
            if not group:
                continue
            environment = group[0].environment
            try:
                streams = self.by_environment[environment].streams(group, scores)
                check_streams(group, streams)
            except ValueError as error:
                raise RunError(f"the algorithm of environment {environment!r}: {error}") from error
            made |= {rollout.rollout_id: tuple(streams[rollout.rollout_id]) for rollout in group}
        return made

    def state(self) -> AlgorithmState:
        states = {name: dict(recipe.state()) for name, recipe in self.by_environment.items()}
        return {name: state for name, state in states.items() if state}

    def restore(self, state: AlgorithmState) -> None:
        """Goes back to what `state` returned, without environments that are gone."""
        for name, recipe in self.by_environment.items():
            recipe.restore(state.get(name, {}))


def _build_recipe(algo: AlgoConfig, of_rewards: AdvantageConfig, seq_len: int) -> Recipe:
    if algo.import_path is not None:
        try:
            return load_recipe(algo.import_path, algo.kwargs, key="orchestrator.algo")
        except (ValueError, TypeError) as error:
            raise RunError(str(error)) from error
    if algo.type == "max_rl":
        return MaxRL()
    if algo.type == "rae":
        return RoleBaseline(algo.decay)
    weight = algo.weight or 1.0
    if algo.type == "opd":
        return OnPolicyDistillation(weight=weight, top_k=algo.top_k)
    if algo.type == "opsd":
        context_tokens = algo.context_tokens or seq_len - 1
        scored_by = Actor.POLICY if algo.teacher is None else Actor.TEACHER
        return SelfDistillation(weight=weight, context_tokens=context_tokens, top_k=algo.top_k, scored_by=scored_by)
    if algo.type == "sft":
        return Imitation(weight=weight, min_reward=algo.min_reward)
    advantage = build_advantage(of_rewards)
    if algo.type == "hierarchical_grpo":
        return HierarchicalGroupRelative(advantage, episode_agents=algo.episode_agents)
    if algo.type == "echo":
        return Echo(advantage, roles=algo.roles, weight=algo.weight or ECHO_WEIGHT)
    return GroupRelative(advantage)


def build_advantage(config: AdvantageConfig) -> Advantage:
    """The configured advantage, of rewards less the length penalty if there is one. Raises RunError, which names the
    key, for a function that cannot be called, and later for a result that no batch can be made of."""
    if config.import_path is None:
        advantage = ADVANTAGES[config.type]
    else:
        try:
            function = load_custom_advantage(config.import_path, config.kwargs, key="orchestrator.advantage")
        except ValueError as error:
            raise RunError(str(error)) from error

        def advantage(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
            try:
                return function(rewards_G, lengths_G)
            except ValueError as error:  # told apart from a batch without tokens, which raises ValueError too
                raise RunError(str(error)) from error

    penalty = config.length_penalty
    if penalty is None:
        return advantage
    if penalty.max_length is None or penalty.buffer_length is None:
        return penalise_length(advantage, partial(per_token_penalty, coefficient=penalty.weight))
    overlong = partial(
        soft_overlong_penalty,
        max_length=penalty.max_length,
        buffer_length=penalty.buffer_length,
        weight=penalty.weight,
    )
    return penalise_length(advantage, overlong)
