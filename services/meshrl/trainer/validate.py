"""Checks a batch at the trainer's door, so that nothing past it can break a step halfway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshrl.wire.errors import FieldViolation, invalid
from meshrl.wire.types import Batch, MicroBatch


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """What a trainer can take."""

    seq_len: int
    dp_size: int
    vocab_size: int


def check_batch(batch: Batch, limits: BatchLimits) -> None:
    """Raises INVALID_REQUEST with every violation found."""
    violations = [*_check_shape(batch, limits)]
    for index, micro_batch in enumerate(batch.micro_batches):
        violations += [
            FieldViolation(field=f"micro_batches[{index}].{name}", description=problem)
            for name, problem in _check_row(micro_batch, limits, len(batch.environments))
        ]
    if violations:
        raise invalid(violations, f"the batch of step {batch.step}")


def _check_shape(batch: Batch, limits: BatchLimits) -> Iterator[FieldViolation]:
    if batch.step < 1:
        yield FieldViolation(field="header.step", description=f"steps count from 1, got {batch.step}")
    count = len(batch.micro_batches)
    if count == 0 or count % limits.dp_size:
        yield FieldViolation(
            field="header.num_micro_batches", description=f"must be a multiple of dp_size {limits.dp_size}, got {count}"
        )
    ranks = Counter(row.dp_rank for row in batch.micro_batches)
    if any(ranks[rank] * limits.dp_size != count for rank in range(limits.dp_size)):
        yield FieldViolation(
            field="micro_batches.dp_rank",
            description=f"ranks 0 to {limits.dp_size - 1} must get as many each, got {dict(sorted(ranks.items()))}",
        )
    loss_tokens = sum(int(np.count_nonzero(row.loss_mask)) for row in batch.micro_batches)
    if batch.loss_tokens != loss_tokens or loss_tokens == 0:
        yield FieldViolation(
            field="header.loss_tokens",
            description=f"must be the number of tokens in the loss masks, {loss_tokens}, and above 0; "
            f"got {batch.loss_tokens}",
        )


def _check_row(row: MicroBatch, limits: BatchLimits, environments: int) -> Iterator[tuple[str, str]]:
    length, samples = len(row.token_ids), len(row.temperatures)
    if not 1 <= length <= limits.seq_len:
        yield "token_ids", f"1 to {limits.seq_len} tokens (seq_len), got {length}"
        return
    for name in ("position_ids", "loss_mask", "advantages", "inference_logprobs"):
        if len(getattr(row, name)) != length:
            yield name, f"one value a token, {length}, got {len(getattr(row, name))}"
            return
    offsets = row.sample_offsets
    if samples == 0 or len(offsets) != samples + 1 or len(row.env_index) != samples or len(row.rollout_ids) != samples:
        yield (
            "sample_offsets",
            f"S + 1 offsets and S temperatures, env indices and rollout ids, got {len(offsets)}, {samples}, "
            f"{len(row.env_index)} and {len(row.rollout_ids)}",
        )
        return
    if offsets[0] != 0 or offsets[-1] != length or (np.diff(offsets) < 1).any():
        yield "sample_offsets", f"must rise from 0 to {length}, got {offsets.tolist()[:8]}"
        return
    lengths = np.diff(offsets)
    if (row.position_ids != np.arange(length) - np.repeat(offsets[:-1], lengths)).any():
        yield "position_ids", "must count from 0 within each sample"
    if row.token_ids.min() < 0 or row.token_ids.max() >= limits.vocab_size:
        yield "token_ids", f"ids from 0 to {limits.vocab_size - 1}, got {row.token_ids.min()} to {row.token_ids.max()}"
    if row.loss_mask[offsets[:-1]].any():
        yield "loss_mask", "must be false at the first token of a sample, which nothing predicts"
    if not np.isfinite(row.advantages).all():
        yield "advantages", "must be finite"
    if not np.isfinite(row.inference_logprobs).all() or (row.inference_logprobs[row.loss_mask] > 1e-4).any():
        yield "inference_logprobs", "must be finite logprobs, not above 0"
    if not (np.isfinite(row.temperatures).all() and (row.temperatures > 0).all()):
        yield "temperatures", "must be above 0: training on greedy samples has no sampling distribution to correct for"
    if (row.env_index < 0).any() or (row.env_index >= environments).any():
        yield "env_index", f"must point into the header's {environments} environments"
