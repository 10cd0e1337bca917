"""Packs the samples of a step into rows of at most `seq_len` tokens; last thing the orchestrator does to a batch.

Shapes: T tokens of a sample or row, S samples of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshrl.wire.types import MicroBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainSample:
    """One token sequence to train on; `advantage` holds for each of its loss tokens."""

    token_ids: NDArray[np.int32]  # (T,)
    loss_mask: NDArray[np.bool_]  # (T,) tokens the policy sampled; the first of a sample has nothing to predict it
    logprobs: NDArray[np.float32]  # (T,) when sampled; ignored where loss_mask is false
    advantage: float = 1.0
    temperature: float = 1.0
    env_index: int = 0
    rollout_id: str = ""
    traceparent: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """The rows of a step. `loss_tokens` normalises its loss."""

    micro_batches: tuple[MicroBatch, ...]
    loss_tokens: int
    truncated_samples: int  # lost tokens at their end
    dropped_samples: int  # had no loss token, or none left after truncation


def pack_samples(samples: Sequence[TrainSample], *, seq_len: int, dp_size: int = 1) -> Packing:
    """Packs samples into rows by first-fit decreasing, whose rows number at most 11/9 of the fewest plus one.

    The number of rows is a multiple of dp_size and each rank gets as many: rows are split while one holds several
    samples, then filled up with rows without loss. A sample longer than seq_len is truncated at its tail; one without
    any loss token is left out. The same input gives the same output. Raises ValueError for a sample whose arrays
    differ in length, and when nothing is left to train on.
    """
    if seq_len < 2 or dp_size < 1:
        raise ValueError(f"seq_len must be at least 2 and dp_size at least 1, got {seq_len} and {dp_size}")
    kept: list[TrainSample] = []
    truncated = 0
    for sample in samples:
        fitted = _fit(sample, seq_len)
        if fitted.loss_mask.any():
            kept.append(fitted)
            truncated += len(fitted.token_ids) < len(sample.token_ids)
    if not kept:
        raise ValueError(f"none of the {len(samples)} samples has a loss token within seq_len {seq_len}")

    lengths = [len(sample.token_ids) for sample in kept]
    rows = _split_for_ranks(_first_fit_decreasing(lengths, seq_len), dp_size)
    rows.sort(key=lambda row: (-sum(lengths[index] for index in row), row))  # neighbours, one a rank, are alike
    micro_batches = [_micro_batch([kept[index] for index in row], rank % dp_size) for rank, row in enumerate(rows)]
    while len(micro_batches) % dp_size:
        micro_batches.append(_without_loss(micro_batches[-1], len(micro_batches) % dp_size))
    return Packing(
        micro_batches=tuple(micro_batches),
        loss_tokens=sum(int(sample.loss_mask.sum()) for sample in kept),
        truncated_samples=truncated,
        dropped_samples=len(samples) - len(kept),
    )


def _fit(sample: TrainSample, seq_len: int) -> TrainSample:
    """The sample's first seq_len tokens, with the mask of a first token cleared."""
    length = len(sample.token_ids)
    if len(sample.loss_mask) != length or len(sample.logprobs) != length:
        raise ValueError(
            f"sample of rollout {sample.rollout_id!r}: {length} token ids, {len(sample.loss_mask)} mask values "
            f"and {len(sample.logprobs)} logprobs; they must be as many"
        )
    mask = sample.loss_mask[:seq_len].copy()
    mask[:1] = False
    return TrainSample(
        token_ids=sample.token_ids[:seq_len],
        loss_mask=mask,
        logprobs=sample.logprobs[:seq_len],
        advantage=sample.advantage,
        temperature=sample.temperature,
        env_index=sample.env_index,
        rollout_id=sample.rollout_id,
        traceparent=sample.traceparent,
    )


def _first_fit_decreasing(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        row = next((row for row, free in enumerate(room) if lengths[index] <= free), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(seq_len)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def _split_for_ranks(rows: list[list[int]], dp_size: int) -> list[list[int]]:
    """Halves the fullest row until the ranks share the rows evenly or each row holds one sample."""
    rows = [sorted(row) for row in rows]
    while len(rows) % dp_size:
        fullest = max(range(len(rows)), key=lambda row: (len(rows[row]), -row))
        row = rows[fullest]
        if len(row) == 1:
            break
        rows[fullest : fullest + 1] = [row[::2], row[1::2]]
    return rows


def _micro_batch(samples: Sequence[TrainSample], dp_rank: int) -> MicroBatch:
    lengths = [len(sample.token_ids) for sample in samples]
    mask = np.concatenate([sample.loss_mask for sample in samples])
    logprobs = np.concatenate([sample.logprobs for sample in samples]).astype(np.float32)
    advantages = np.repeat(np.array([sample.advantage for sample in samples], dtype=np.float32), lengths)
    return MicroBatch(
        dp_rank=dp_rank,
        token_ids=np.concatenate([sample.token_ids for sample in samples]).astype(np.int32),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        loss_mask=mask,
        advantages=np.where(mask, advantages, np.float32(0.0)),
        inference_logprobs=np.where(mask, logprobs, np.float32(0.0)),
        sample_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        temperatures=np.array([sample.temperature for sample in samples], dtype=np.float32),
        env_index=np.array([sample.env_index for sample in samples], dtype=np.int32),
        rollout_ids=tuple(sample.rollout_id for sample in samples),
        traceparents=tuple(dict.fromkeys(sample.traceparent for sample in samples if sample.traceparent)),
    )


def _without_loss(row: MicroBatch, dp_rank: int) -> MicroBatch:
    """A filler that costs a rank its share of the time and adds nothing to the gradient: the row's first sample."""
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
