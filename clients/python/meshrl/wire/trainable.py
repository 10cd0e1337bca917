"""Rules that token sequences must keep to be trained: rollouts at the orchestrator, batches at the trainer.

Shapes: T tokens of a row, S samples packed in it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from meshrl.wire.types import Rollout, RoutedShape
from meshrl.wire.types.routes import MAX_NARROW_EXPERTS, Routes, unknown_of
from meshrl.wire.values import Array

LOGPROB_ROUNDING = 1e-3  # a certain token's logprob may come out this far above 0 in low precision


def row_problems(
    *,
    token_ids_T: NDArray[np.int32],
    loss_mask_T: NDArray[np.bool_],
    logprobs_T: NDArray[np.float32],
    unpredicted: NDArray[np.int64],
    temperatures_S: NDArray[np.float32],
    vocab_size: int | None,
    logprobs: str = "logprobs",
) -> Iterator[tuple[str, str]]:
    """(field, what it must be) for every broken rule; a row has at least one token.

    `unpredicted` are indices of tokens that nothing predicts. `logprobs` names that field.
    """
    lowest, highest = int(token_ids_T.min()), int(token_ids_T.max())
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        known = "be 0 or more" if vocab_size is None else f"lie in the model's vocabulary, 0 to {vocab_size - 1}"
        yield "token_ids", f"must {known}; got {lowest} to {highest}"
    if loss_mask_T[unpredicted].any():
        yield "loss_mask", "must be false at the first token of a sample, which nothing predicts"
    if not are_logprobs(logprobs_T[loss_mask_T]):
        yield logprobs, "must be logprobs, so finite and not above 0"
    if not (np.isfinite(temperatures_S).all() and (temperatures_S > 0).all()):
        yield "temperatures", "must be above 0: a greedy sample has no distribution to correct for"


def are_logprobs(values: Array) -> bool:
    """Whether each may be a sampled token's."""
    return bool(np.isfinite(values).all() and (values <= LOGPROB_ROUNDING).all())


def bytes_per_token(shape: RoutedShape) -> int:
    return shape.layers * shape.per_token * (1 if shape.experts <= MAX_NARROW_EXPERTS else 2)


def routes_problem(routes: Routes | None, shape: RoutedShape) -> str | None:
    """What they must be for the model; None if they are."""
    if routes is None:
        return None
    if routes.shape[1:] != (shape.layers, shape.per_token):
        return f"must be of {shape.layers} layers and {shape.per_token} experts a token, got {routes.shape[1:]}"
    if routes[routes != unknown_of(routes)].max(initial=0) >= shape.experts or routes.min(initial=0) < -1:
        return f"must be experts below {shape.experts}, or {unknown_of(routes)} for unknown"
    return None


def rollout_problems(
    rollout: Rollout, *, vocab_size: int | None, newest_version: int | None = None, routed: RoutedShape | None = None
) -> tuple[tuple[str, str], ...]:
    """(field, what it must be) for all that keeps a trainer from taking a finished rollout. `newest_version` is the
    newest that exists; None checks no versions, or no routes."""
    found: list[tuple[str, str]] = []
    for index, sample in enumerate(rollout.samples):
        field = f"samples[{index}]"
        if not len(sample.token_ids):
            found.append((f"{field}.token_ids", "must not be empty"))
            continue
        found += [
            (f"{field}.{'temperature' if name == 'temperatures' else name}", problem)
            for name, problem in row_problems(
                token_ids_T=sample.token_ids,
                loss_mask_T=sample.loss_mask,
                logprobs_T=sample.logprobs,
                unpredicted=np.zeros(1, dtype=np.int64),
                temperatures_S=np.array([sample.temperature], dtype=np.float32),
                vocab_size=vocab_size,
            )
        ]
        if routed is not None and (problem := routes_problem(sample.routed_experts, routed)) is not None:
            found.append((f"{field}.routed_experts", problem))
        newest = max((span.version for span in sample.version_spans), default=0)
        if newest_version is not None and newest > newest_version:
            found.append((f"{field}.version_spans", f"name version {newest}, but the newest is {newest_version}"))
    return tuple(found)
