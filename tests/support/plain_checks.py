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
    """Logprobs are of the distribution after temperature and cuts, and no token that is cut was sampled.

    Engines with rounder numbers are held to that where it is clear which tokens the cuts leave.
    """
    expected = at(processed_logprobs(logits_TV, **how), choice["token_ids"])
    clear = [True] * len(expected) if kind.dtype == torch.float32 else _clear_cuts(kind, logits_TV, how).tolist()
    assert any(clear), "no position has a clear cut"
    found = logprobs_of(choice)
    check_near(
        kind, *([value for value, sure in zip(values, clear, strict=True) if sure] for values in (expected, found))
    )


def _clear_cuts(kind: EngineKind, logits_TV: torch.Tensor, how: Mapping[str, Any]) -> torch.Tensor:
    """(T,) whether slightly other logits would leave the same tokens."""
    kept_TV, wider_TV, narrower_TV = (
        processed_logprobs(logits_TV, **_shifted(how, share)).isfinite() for share in (0.0, 0.05, -0.05)
    )
    lowest = logits_TV.masked_fill(~kept_TV, torch.inf).amin(-1)
    highest_cut = logits_TV.masked_fill(kept_TV, -torch.inf).amax(-1)
    return (wider_TV == narrower_TV).all(-1) & (lowest - highest_cut > kind.clear_margin)


def _shifted(how: Mapping[str, Any], share: float) -> dict[str, Any]:
    """The same cuts, wider by a share of what they take away."""
    shifted = dict(how)
    if "top_p" in how:
        shifted["top_p"] = how["top_p"] + share * (1 - how["top_p"])
    if "min_p" in how:
        shifted["min_p"] = how["min_p"] * (1 - share)
    return shifted


def check_near(kind: EngineKind, expected: list[float], found: list[float]) -> None:
    apart = [abs(one - other) for one, other in zip(expected, found, strict=True)]
    assert all(map(math.isfinite, apart)), "a token was sampled that the cuts remove"
    assert max(apart) <= kind.logprob_atol, f"logprob {max(apart):.5f} off at position {apart.index(max(apart))}"
    assert sum(apart) / len(apart) <= kind.logprob_mean
