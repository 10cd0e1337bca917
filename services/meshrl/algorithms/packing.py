"""Packs the samples of a step into rows of at most `seq_len` tokens.

A sample is packed when a term of the objective has a token of it: loss_mask marks those of rl, a weight other than 0
those of ce and ref_kl. `balance` chooses the row of each sample, `prefixes` the samples that share their beginning.

Shapes: T tokens of a sample or row, S samples of a row, K candidates of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from meshrl.algorithms.balance import divide, waiting_cost
from meshrl.algorithms.prefixes import Beginning, Bundle, bundles
from meshrl.wire.types import MicroBatch
from meshrl.wire.types.routes import Routes, joined
from meshrl.wire.values import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainSample:
    """`advantage` is of each loss token. Weights are None where no token has one; rl then weighs each of its tokens
    1."""

    token_ids: NDArray[np.int32]  # (T,)
    loss_mask: NDArray[np.bool_]  # (T,) tokens the policy sampled; the first of a sample has nothing to predict it
    logprobs: NDArray[np.float32]  # (T,) when sampled; ignored where neither loss_mask nor ref_kl_weights has the token
    advantage: float = 1.0
    temperature: float = 1.0
    env_index: int = 0
    rollout_id: str = ""
    traceparent: str = ""
    rl_weights: NDArray[np.float32] | None = None  # (T,) read where loss_mask is true
    ce_weights: NDArray[np.float32] | None = None  # (T,)
    ref_kl_weights: NDArray[np.float32] | None = None  # (T,)
    ref_logprobs: NDArray[np.float32] | None = None  # (T,) with ref_kl_weights
    ref_top_ids: NDArray[np.int32] | None = None  # (T, K) candidates of ref_kl tokens, with ref_kl_weights; -1: none
    ref_top_logprobs: NDArray[np.float32] | None = None  # (T, K) with ref_top_ids
    routed_experts: Routes | None = None  # (T, L, K) experts that the tokens went through; None: unknown
    group: str | None = None  # samples of one group may share their beginning; None shares with none

    @property
    def first_term(self) -> int | None:
        """Index of the first token of any term."""
        terms = (self.loss_mask, self.ce_weights, self.ref_kl_weights)
        found = [int(np.argmax(tokens != 0)) for tokens in terms if tokens is not None and tokens.any()]
        return min(found, default=None)

    def part(self, start: int, stop: int | None = None) -> TrainSample:
        """The tokens from `start` to before `stop`."""
        arrays = {name: getattr(self, name) for name in ("token_ids", "loss_mask", "logprobs", *_ARRAYS)}
        return replace(self, **{name: array[start:stop] for name, array in arrays.items() if array is not None})


_FILL: Mapping[str, tuple[float, type[np.generic]]] = {
    "rl_weights": (1.0, np.float32),
    "ce_weights": (0.0, np.float32),
    "ref_kl_weights": (0.0, np.float32),
    "ref_logprobs": (0.0, np.float32),
    "ref_top_ids": (-1, np.int32),
    "ref_top_logprobs": (0.0, np.float32),
}
"""Of a sample without the array in a row that has it, or with fewer candidates, and the row's type."""

_ARRAYS = (*_FILL, "routed_experts")


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """`loss_tokens` counts the tokens of the rl term."""

    micro_batches: tuple[MicroBatch, ...]
    loss_tokens: int
    truncated_samples: int  # lost tokens at their end
    dropped_samples: int  # had no token to train on, or none left after truncation


def pack_samples(
    samples: Sequence[TrainSample],
    *,
    seq_len: int,
    dp_size: int = 1,
    min_shared_prefix: float | None = None,
) -> Packing:
    """Packs samples into about as few rows as can hold them, of like cost across ranks at each micro-step.

    Rows come micro-step by micro-step, one a rank; a multiple of dp_size, if need be by rows without loss. A longer
    sample is truncated at its tail; one without a token to train on is left out. With `min_shared_prefix` samples of a
    group share a beginning of at least this share of their tokens, unless that costs more waiting between ranks than it
    saves. Deterministic. Raises ValueError for inconsistent arrays, and when nothing is left to train on.
    """
    kept: list[TrainSample] = []
    truncated = 0
    for sample in samples:
        fitted = _fit(sample, seq_len)
        if fitted.first_term is not None:
            kept.append(fitted)
            truncated += len(fitted.token_ids) < len(sample.token_ids)
    if not kept:
        raise ValueError(f"none of the {len(samples)} samples has a loss token within seq_len {seq_len}")

    rows = _rows(kept, seq_len=seq_len, dp_size=dp_size, min_shared_prefix=min_shared_prefix)
    micro_batches = [_micro_batch(kept, row, rank % dp_size) for rank, row in enumerate(rows)]
    while len(micro_batches) % dp_size:
        micro_batches.append(_without_loss(micro_batches[-1], len(micro_batches) % dp_size))
    return Packing(
        micro_batches=tuple(micro_batches),
        loss_tokens=sum(int(sample.loss_mask.sum()) for sample in kept),
        truncated_samples=truncated,
        dropped_samples=len(samples) - len(kept),
    )


def shared_prefix_ratio(micro_batches: Sequence[MicroBatch]) -> float:
    shared = sum(row.shared_tokens for row in micro_batches)
    return shared / (shared + sum(len(row.token_ids) for row in micro_batches))


def _rows(
    samples: Sequence[TrainSample], *, seq_len: int, dp_size: int, min_shared_prefix: float | None
) -> list[list[Bundle]]:
    lengths = [len(sample.token_ids) for sample in samples]

    def divided(units: Sequence[Bundle]) -> tuple[list[list[Bundle]], float]:
        costs = [unit.cost(lengths) for unit in units]
        tokens = [unit.tokens(lengths) for unit in units]
        rows = divide(tokens, costs, seq_len=seq_len, dp_size=dp_size)
        return [[units[index] for index in row] for row in rows], waiting_cost(rows, costs, dp_size)

    repeated, repeated_cost = divided([Bundle((index,), (0,)) for index in range(len(samples))])
    if min_shared_prefix is None:
        return repeated
    beginnings = [
        Beginning(token_ids=sample.token_ids, first_term=sample.first_term or 0, group=sample.group)
        for sample in samples
    ]
    found = bundles(beginnings, max_tokens=seq_len, parts=dp_size, min_share=min_shared_prefix)
    shared, shared_cost = divided(found)
    return shared if shared_cost < repeated_cost else repeated


def _fit(sample: TrainSample, seq_len: int) -> TrainSample:
    """The first token belongs to no term. Raises ValueError for inconsistent arrays."""
    length, what = len(sample.token_ids), f"sample of rollout {sample.rollout_id!r}"
    if len(sample.loss_mask) != length or len(sample.logprobs) != length:
        raise ValueError(
            f"{what}: {length} token ids, {len(sample.loss_mask)} mask values "
            f"and {len(sample.logprobs)} logprobs; they must be as many"
        )
    for name in _ARRAYS:
        array = getattr(sample, name)
        if array is not None and len(array) != length:
            raise ValueError(f"{what}: {length} token ids and {len(array)} {name}; they must be as many")
    cut = sample.part(0, seq_len)
    terms = ("loss_mask", "ce_weights", "ref_kl_weights")
    copies = {name: array.copy() for name in terms if (array := getattr(cut, name)) is not None}
    for tokens in copies.values():
        tokens[:1] = 0
    return replace(cut, **copies)


def _micro_batch(kept: Sequence[TrainSample], row: Sequence[Bundle], dp_rank: int) -> MicroBatch:
    prefixes = [prefix for bundle in row for prefix in bundle.prefixes]
    starts = accumulate((len(bundle.members) for bundle in row), initial=0)
    roots = [start for start, bundle in zip(starts, row, strict=False) for _ in bundle.members]
    members = [kept[index] for bundle in row for index in bundle.members]
    samples = [sample.part(prefix) for sample, prefix in zip(members, prefixes, strict=True)]
    lengths = [len(sample.token_ids) for sample in samples]
    mask = np.concatenate([sample.loss_mask for sample in samples])
    known = np.concatenate([_has_logprobs(sample) for sample in samples])
    logprobs = np.concatenate([sample.logprobs for sample in samples]).astype(np.float32)
    advantages = np.repeat(np.array([sample.advantage for sample in samples], dtype=np.float32), lengths)
    return MicroBatch(
        dp_rank=dp_rank,
        token_ids=np.concatenate([sample.token_ids for sample in samples]).astype(np.int32),
        position_ids=np.concatenate(
            [np.arange(at, at + length, dtype=np.int32) for at, length in zip(prefixes, lengths, strict=True)]
        ),
        loss_mask=mask,
        advantages=np.where(mask, advantages, np.float32(0.0)),
        inference_logprobs=np.where(known, logprobs, np.float32(0.0)),
        sample_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        temperatures=np.array([sample.temperature for sample in samples], dtype=np.float32),
        env_index=np.array([sample.env_index for sample in samples], dtype=np.int32),
        rollout_ids=tuple(sample.rollout_id for sample in samples),
        traceparents=tuple(dict.fromkeys(sample.traceparent for sample in samples if sample.traceparent)),
        prefix_tokens=np.array(prefixes, dtype=np.int32) if any(prefixes) else None,
        prefix_samples=np.array(roots, dtype=np.int32) if any(prefixes) else None,
        **{name: _column(samples, name) for name in _FILL},
        routed_experts=joined((len(sample.token_ids), sample.routed_experts) for sample in samples),
    )


def _has_logprobs(sample: TrainSample) -> NDArray[np.bool_]:
    """(T,), whether the objective reads a token's."""
    if sample.ref_kl_weights is None:
        return sample.loss_mask
    known: NDArray[np.bool_] = sample.loss_mask | (sample.ref_kl_weights != 0)
    return known


def _column(samples: Sequence[TrainSample], name: str) -> Array | None:
    """(T,) or (T, K) of a row, as wide as the sample with most candidates."""
    arrays: list[Array | None] = [getattr(sample, name) for sample in samples]
    widths = [array.shape[1:] for array in arrays if array is not None]
    widest = max(widths, default=(0,))
    if 0 in widest:
        return None
    fill, dtype = _FILL[name]
    made = np.full((sum(len(sample.token_ids) for sample in samples), *widest), fill, dtype=dtype)
    start = 0
    for sample, array in zip(samples, arrays, strict=True):
        end = start + len(sample.token_ids)
        if array is not None:
            made[(slice(start, end), *map(slice, array.shape[1:]))] = array
        start = end
    return made


def _without_loss(row: MicroBatch, dp_rank: int) -> MicroBatch:
    end = int(row.sample_offsets[1])
    return MicroBatch(
        dp_rank=dp_rank,
        token_ids=row.token_ids[:end],
        position_ids=row.position_ids[:end],
        loss_mask=np.zeros(end, dtype=np.bool_),
        advantages=np.zeros(end, dtype=np.float32),
        inference_logprobs=np.zeros(end, dtype=np.float32),
        sample_offsets=row.sample_offsets[:2],
        temperatures=row.temperatures[:1],
        env_index=row.env_index[:1],
        rollout_ids=row.rollout_ids[:1],
    )
