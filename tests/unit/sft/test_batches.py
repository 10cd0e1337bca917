"""How samples are dealt into steps."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.algorithms.packing import TrainSample
from meshrl.sft.batches import SFTBatch, training_batches


def samples_of(lengths: list[int]) -> list[TrainSample]:
    """Samples that can be told apart by their tokens."""
    return [
        TrainSample(
            token_ids=np.full(length, index, dtype=np.int32),
            loss_mask=np.ones(length, dtype=np.bool_),
            logprobs=np.zeros(length, dtype=np.float32),
        )
        for index, length in enumerate(lengths)
    ]


def seen(batch: SFTBatch) -> list[int]:
    rows = batch.packing.micro_batches
    return [int(row.token_ids[offset]) for row in rows for offset in row.sample_offsets[:-1]]


@settings(deadline=None, max_examples=50)  # a busy machine is not a slow function
@given(st.lists(st.integers(2, 20), min_size=1, max_size=12), st.integers(2, 50), st.integers(0, 3))
def test_each_epoch_takes_every_sample_once(lengths: list[int], batch_tokens: int, seed: int) -> None:
    batches = training_batches(samples_of(lengths), batch_tokens=batch_tokens, seq_len=32, seed=seed)
    taken: list[int] = []
    while len(taken) < 2 * len(lengths):
        taken += seen(next(batches))
    counts = np.bincount(taken, minlength=len(lengths))
    passes, rest = divmod(len(taken), len(lengths))
    assert counts.min() == passes
    assert (counts > passes).sum() == rest
    assert counts.max() <= passes + 1


@settings(deadline=None, max_examples=50)  # a busy machine is not a slow function
@given(st.lists(st.integers(2, 20), min_size=1, max_size=12), st.integers(2, 50))
def test_a_step_stays_within_its_tokens_unless_one_sample_is_longer(lengths: list[int], batch_tokens: int) -> None:
    for batch in islice(training_batches(samples_of(lengths), batch_tokens=batch_tokens, seq_len=32, seed=0), 8):
        assert batch.tokens <= batch_tokens or batch.samples == 1
        assert batch.tokens == sum(len(row.token_ids) for row in batch.packing.micro_batches)


def test_a_resumed_run_goes_on_where_it_stopped() -> None:
    samples = samples_of([3, 4, 5, 6, 7])
    whole = [seen(b) for b in islice(training_batches(samples, batch_tokens=10, seq_len=16, seed=1), 9)]
    resumed = [seen(b) for b in islice(training_batches(samples, batch_tokens=10, seq_len=16, seed=1, skip=4), 5)]
    assert resumed == whole[4:]


def test_epoch_counts_passes_over_the_data() -> None:
    batches = training_batches(samples_of([4, 4, 4, 4]), batch_tokens=8, seq_len=16, seed=0)
    assert [batch.epoch for batch in islice(batches, 4)] == pytest.approx([0.5, 1.0, 1.5, 2.0])
