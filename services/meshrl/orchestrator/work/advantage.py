"""Builds the advantage that the configuration describes; used where the groups of a step become a batch."""

from __future__ import annotations

from collections.abc import Sequence
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
from meshrl.orchestrator.algo_config import AdvantageConfig
from meshrl.sampling.retry import RunError

_KEY = "orchestrator.advantage"


def build_advantage(config: AdvantageConfig) -> Advantage:
    """The configured advantage, of rewards less the length penalty if there is one.

    Raises RunError, which names the key, for a function that cannot be called; a result that no batch can be made of
    raises it when the function returns it.
    """
    if config.import_path is None:
        advantage = ADVANTAGES[config.type]
    else:
        try:
            function = load_custom_advantage(config.import_path, config.kwargs, key=_KEY)
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
