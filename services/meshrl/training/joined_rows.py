"""Joins rows, of one step or of several runs: fewer passes, each of more tokens.

A pass gathers parameters, launches kernels, and reads and writes all weights and gradients of a mixture's experts.
Losses do not depend on how samples are divided over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshrl.wire.types import MicroBatch
from meshrl.wire.types.routes import joined

_OF_TOKENS = ("token_ids", "position_ids", "loss_mask", "advantages", "inference_logprobs")
_OF_SAMPLES = ("temperatures", "env_index")
_OPTIONAL = (
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
    "ref_logprobs",
    "ref_top_ids",
    "ref_top_logprobs",
)


def join_rows(micro_batches: Sequence[MicroBatch], *, max_tokens: int | None) -> list[MicroBatch]:
    """The micro-batches, with neighbours joined up to `max_tokens`; None joins none.

    Rows are joined alike for each dp_rank, so that all ranks make the same passes. Other `kinds` stay apart.
    """
    if max_tokens is None:
        return list(micro_batches)
    ranks = sorted({row.dp_rank for row in micro_batches})
    by_rank = [[row for row in micro_batches if row.dp_rank == rank] for rank in ranks]
    passes: list[list[tuple[MicroBatch, ...]]] = []  # of each pass its rows, a tuple for each of its places
    for place in zip(*by_rank, strict=True):
        last = passes[-1] if passes else []
        sizes = [sum(len(row.token_ids) for row in rows) for rows in zip(*last, place, strict=True)]
        if last and max(sizes) <= max_tokens and kinds(last[-1]) == kinds(place):
            last.append(place)
        else:
            passes.append([place])
    return [joined_row(rows) for each in passes for rows in zip(*each, strict=True)]


def kinds(rows: Sequence[MicroBatch]) -> tuple[tuple[tuple[int, ...] | None, ...], ...]:
    """Each row's optional quantities, by their values a token: equal rows can be joined."""
    return tuple(
        tuple(None if (array := getattr(row, name)) is None else array.shape[1:] for name in _OPTIONAL) for row in rows
    )


def joined_row(rows: Sequence[MicroBatch]) -> MicroBatch:
    """One row of the tokens of all; names, rank and environments are the first one's."""
    if len(rows) == 1:
        return rows[0]
    tokens = np.cumsum([0, *(len(row.token_ids) for row in rows)])
    samples = np.cumsum([0, *(len(row.rollout_ids) for row in rows)])
    parts = {
        name: np.concatenate([getattr(row, name) for row in rows])
        for name in (*_OF_TOKENS, *_OF_SAMPLES, *_OPTIONAL)
        if getattr(rows[0], name) is not None
    }
    offsets = [row.sample_offsets[1:] + start for row, start in zip(rows, tokens, strict=False)]
    if any(row.prefix_tokens is not None for row in rows):
        for name, shift in (("prefix_tokens", np.zeros_like(samples)), ("prefix_samples", samples)):
            held = [
                np.zeros(len(row.rollout_ids)) if getattr(row, name) is None else getattr(row, name) for row in rows
            ]
            moved = [own + start for own, start in zip(held, shift, strict=False)]
            parts[name] = np.concatenate(moved).astype(np.int32)
    return replace(
        rows[0],
        **parts,
        sample_offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        rollout_ids=tuple(each for row in rows for each in row.rollout_ids),
        traceparents=tuple(each for row in rows for each in row.traceparents),
        routed_experts=joined([(len(row.token_ids), row.routed_experts) for row in rows]),
    )
