"""Makes the algorithm of each training environment from the configuration."""

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
from meshrl.algorithms.recipes.base import Actor, Recipe
from meshrl.algorithms.recipes.custom import load_recipe
from meshrl.algorithms.recipes.echo import Echo
from meshrl.algorithms.recipes.grpo import GRPO
from meshrl.algorithms.recipes.hierarchical_grpo import HierarchicalGRPO
from meshrl.algorithms.recipes.max_rl import MaxRL
from meshrl.algorithms.recipes.opd import OnPolicyDistillation
from meshrl.algorithms.recipes.opsd import SelfDistillation
from meshrl.algorithms.recipes.rae import RoleBaseline
from meshrl.algorithms.recipes.sft import Imitation
from meshrl.orchestrator.config import AdvantageConfig, AlgoConfig
from meshrl.sampling.retry import RunError

ECHO_WEIGHT = 0.1


def build_recipes(algos: Mapping[str, AlgoConfig], of_rewards: AdvantageConfig, *, seq_len: int) -> dict[str, Recipe]:
    """By environment. Raises RunError for a custom algorithm that cannot be made."""
    recipes = {name: _build_recipe(algo, of_rewards, seq_len) for name, algo in algos.items()}
    for name, recipe in recipes.items():
        if recipe.sampler is Actor.TEACHER and algos[name].type != "sft":
            raise RunError(
                f"the custom algorithm of environment {name!r} wants a teacher to play its rollouts, which only the"
                " algorithm sft has"
            )
    return recipes


def least_rollouts(recipes: Mapping[str, Recipe]) -> dict[str, int]:
    """The fewest rollouts that a group must have left, by environment."""
    return {name: recipe.least_rollouts for name, recipe in recipes.items()}


def _build_recipe(algo: AlgoConfig, of_rewards: AdvantageConfig, seq_len: int) -> Recipe:
    if algo.import_path is not None:
        try:
            return load_recipe(algo.import_path, algo.kwargs)
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
        return HierarchicalGRPO(advantage, episode_agents=algo.episode_agents)
    if algo.type == "echo":
        return Echo(advantage, roles=algo.roles, weight=algo.weight or ECHO_WEIGHT)
    return GRPO(advantage)


def build_advantage(config: AdvantageConfig) -> Advantage:
    """Of rewards less the length penalty. Raises RunError for a function that cannot be called, and later for a result
    that no batch can be made of."""
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
