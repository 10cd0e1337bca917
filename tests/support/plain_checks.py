"""How near an engine's choices must be to the plain model's, in the tolerances of its kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from engine_mesh import EngineKind, logprobs_of
from plain_model import at, processed_logprobs


def check_greedy(kind: EngineKind, logits_TV: torch.Tensor, choice: Mapping[str, Any], *, start: int = 0) -> None:
    """Tokens are the most likely ones wherever that is clear; logprobs are of the uncut distribution.

    The logits are of the tokens of the choice from `start` on.
    """
    token_ids = choice["token_ids"][start : start + len(logits_TV)]
    assert token_ids, "there is nothing to compare"
    best = logits_TV.topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > kind.clear_margin
    assert clear.any(), "no token was a clear choice"
    wrong = [
        (start + index, token_ids[index], int(best.indices[index, 0]))
        for index in clear.nonzero()[:, 0].tolist()
        if token_ids[index] != int(best.indices[index, 0])
    ]
    assert not wrong, f"(position, token, most likely token): {wrong[:5]}"
    check_near(kind, at(processed_logprobs(logits_TV), token_ids), logprobs_of(choice)[start : start + len(logits_TV)])


def check_logprobs(
    kind: EngineKind, logits_TV: torch.Tensor, choice: Mapping[str, Any], how: Mapping[str, Any]
) -> None:
    """Logprobs are of the distribution after temperature and cuts, and no token that is cut was sampled."""
    expected = at(processed_logprobs(logits_TV, **how), choice["token_ids"])
    check_near(kind, expected, logprobs_of(choice))


def check_near(kind: EngineKind, expected: list[float], found: list[float]) -> None:
    apart = [abs(one - other) for one, other in zip(expected, found, strict=True)]
    assert all(map(math.isfinite, apart)), "a token was sampled that the cuts remove"
    assert max(apart) <= kind.logprob_atol, f"logprob {max(apart):.5f} off at position {apart.index(max(apart))}"
    assert sum(apart) / len(apart) <= kind.logprob_mean
