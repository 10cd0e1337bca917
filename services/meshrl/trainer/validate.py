"""Checks a batch at the trainer's door for what its message alone cannot tell; past it, nothing breaks a step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshrl.wire.errors import FieldViolation, invalid
from meshrl.wire.types import Batch, MicroBatch

LOGPROB_ROUNDING = 1e-3  # a certain token's logprob may come out this far above 0 in low precision


def check_batch(batch: Batch, *, vocab_size: int) -> None:
    """Raises INVALID_REQUEST with every violation. Shapes and lengths are already known to be right."""
    violations = [
        FieldViolation(f"micro_batches[{index}].{name}", problem)
        for index, row in enumerate(batch.micro_batches)
        for name, problem in _problems(row, vocab_size)
    ]
    if violations:
        raise invalid(violations, f"the batch of step {batch.step}")


def _problems(row: MicroBatch, vocab_size: int) -> Iterator[tuple[str, str]]:
    starts = row.sample_offsets[:-1]
    expected = np.arange(len(row.token_ids)) - np.repeat(starts, np.diff(row.sample_offsets))
    if (row.position_ids != expected).any():
        yield "position_ids", "must count from 0 within each sample"
    lowest, highest = int(row.token_ids.min()), int(row.token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        yield "token_ids", f"must lie in the model's vocabulary, 0 to {vocab_size - 1}; got {lowest} to {highest}"
    if row.loss_mask[starts].any():
        yield "loss_mask", "must be false at the first token of a sample, which nothing predicts"
    if (row.inference_logprobs[row.loss_mask] > LOGPROB_ROUNDING).any():
        yield "inference_logprobs", "must be logprobs, so not above 0"
    if row.ref_logprobs is not None and (row.ref_logprobs[row.ref_kl_weights != 0] > LOGPROB_ROUNDING).any():
        yield "ref_logprobs", "must be logprobs, so not above 0"
    if not (np.isfinite(row.temperatures).all() and (row.temperatures > 0).all()):
        yield "temperatures", "must be above 0: a greedy sample has no distribution to correct for"
