"""Builds the advantage that the configuration describes; used where the groups of a step become a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from meshrl.algorithms.advantages import (
    ADVANTAGES,
    Advantage,
    Penalty,
    load_custom_advantage,
    penalise_length,
    per_token_penalty,
    soft_overlong_penalty,
)
from meshrl.orchestrator.config import AdvantageConfig, LengthPenaltyConfig
from meshrl.sampling.retry import RunError

_KEY = "orchestrator.advantage"


def build_advantage(config: AdvantageConfig) -> Advantage:
    """The configured advantage, of rewards less the length penalty if there is one.

    Raises RunError, which names the key, for a function that cannot be called; a result that no batch can be made of
    raises it when the function returns it.
    """
    advantage = ADVANTAGES[config.type] if config.import_path is None else _custom(config, config.import_path)
    return advantage if config.length_penalty is None else penalise_length(advantage, _penalty(config.length_penalty))


def _custom(config: AdvantageConfig, import_path: str) -> Advantage:
    try:
        function = load_custom_advantage(import_path, config.kwargs, key=_KEY)
    except ValueError as error:
        raise RunError(str(error)) from error

    def custom(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> NDArray[np.float32]:
        try:
            return function(rewards_G, lengths_G)
        except ValueError as error:  # told apart from a batch without tokens, which raises ValueError too
            raise RunError(str(error)) from error

    return custom


def _penalty(config: LengthPenaltyConfig) -> Penalty:
    if config.max_length is None or config.buffer_length is None:
        return partial(per_token_penalty, coefficient=config.weight)
    return partial(
        soft_overlong_penalty, max_length=config.max_length, buffer_length=config.buffer_length, weight=config.weight
    )
