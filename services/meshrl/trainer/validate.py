"""Checks an uploaded batch against the model before it is queued, so that no batch can break a step of training.

Called by TrainerService after the batch's message was decoded, which checks shapes and lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshrl.wire.errors import FieldViolation, invalid
from meshrl.wire.trainable import are_logprobs, row_problems
from meshrl.wire.types import Batch, MicroBatch


def check_batch(batch: Batch, *, vocab_size: int, takes_prefixes: bool = True) -> None:
    """Raises INVALID_REQUEST with every violation. Shapes and lengths are already known to be right."""
    violations = [
        FieldViolation(f"micro_batches[{index}].{name}", problem)
        for index, row in enumerate(batch.micro_batches)
        for name, problem in _problems(row, vocab_size, takes_prefixes)
    ]
    if violations:
        raise invalid(violations, f"the batch of step {batch.step}")


def _problems(row: MicroBatch, vocab_size: int, takes_prefixes: bool) -> Iterator[tuple[str, str]]:
    lengths, first = np.diff(row.sample_offsets), row.sample_offsets[:-1]
    if row.prefix_tokens is not None:
        first = first - row.prefix_tokens
        if not takes_prefixes:
            yield "prefix_tokens", "must be unset: this trainer's attention takes no shared prefixes"
    if (row.position_ids != np.arange(len(row.token_ids)) - np.repeat(first, lengths)).any():
        yield "position_ids", "must count from 0 within each sample, or from its prefix_tokens"
    yield from row_problems(
        token_ids_T=row.token_ids,
        loss_mask_T=row.loss_mask,
        logprobs_T=row.inference_logprobs,
        unpredicted=row.unpredicted,
        temperatures_S=row.temperatures,
        vocab_size=vocab_size,
        logprobs="inference_logprobs",
    )
    if row.ref_logprobs is not None and not are_logprobs(row.ref_logprobs[row.ref_kl_weights != 0]):
        yield "ref_logprobs", "must be logprobs, so finite and not above 0"
    if row.ref_top_ids is not None and row.ref_top_logprobs is not None:
        if (row.ref_top_ids >= vocab_size).any():
            yield "ref_top_ids", f"must be below the vocabulary's {vocab_size} tokens"
        if not are_logprobs(row.ref_top_logprobs[row.ref_top_ids >= 0]):
            yield "ref_top_logprobs", "must be logprobs, so finite and not above 0"
        ordered_TK = np.sort(row.ref_top_ids, axis=1)
        if ((ordered_TK[:, 1:] == ordered_TK[:, :-1]) & (ordered_TK[:, 1:] >= 0)).any():
            yield "ref_top_ids", "must hold each candidate of a token once"
    if row.ref_kl_weights is not None and not are_logprobs(row.inference_logprobs[row.ref_kl_weights != 0]):
        yield "inference_logprobs", "must be logprobs at the tokens of ref_kl, so finite and not above 0"
