"""How drawn samples are dealt into steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.algorithms.packing import TrainSample
from meshrl.sft.data.batches import DataProgress, SFTBatch, training_batches
from meshrl.sft.data.config import DataConfig
from meshrl.sft.data.conversations import DataError
from meshrl.sft.data.loader import DrawnSample
from meshrl.sft.data.mixture import Cursor, Mixture


def drawn(
    lengths: list[int], config: DataConfig, start: Cursor | None = None, sizes: list[int] | None = None
) -> Iterator[DrawnSample]:
    """Samples that can be told apart by their tokens; a length of 1 leaves nothing to learn."""
    mixture = Mixture(sizes or [len(lengths)], seed=config.seed)
    for draw in mixture.draws(start or Cursor()):
        length = lengths[draw.row]
        sample = TrainSample(
            token_ids=np.full(length, draw.row, dtype=np.int32),
            loss_mask=np.ones(length, dtype=np.bool_),
            logprobs=np.zeros(length, dtype=np.float32),
        )
        yield DrawnSample(draw=draw, sample=sample, usable=length > 1, cut=False)


def dealt(lengths: list[int], config: DataConfig, **options: Any) -> Iterator[SFTBatch]:
    progress = options.pop("progress", None)
    start = progress.next if progress else Cursor()
    return training_batches(drawn(lengths, config, start), config, parts={"train": ""}, progress=progress, **options)


def seen(batch: SFTBatch) -> list[int]:
    rows = batch.packing.micro_batches
    return [int(row.token_ids[offset]) for row in rows for offset in row.sample_offsets[:-1]]


LENGTHS = st.lists(st.integers(2, 20), min_size=1, max_size=12)


@settings(deadline=None, max_examples=50)  # a busy machine is not a slow function
@given(LENGTHS, st.integers(1, 3), st.integers(0, 3))
def test_each_epoch_takes_every_sample_once(lengths: list[int], batch_size: int, seed: int) -> None:
    batches = dealt(lengths, DataConfig(batch_size=batch_size, seq_len=20, seed=seed))
    taken: list[int] = []
    while len(taken) < 2 * len(lengths):
        taken += seen(next(batches))
    counts = np.bincount(taken, minlength=len(lengths))
    passes, rest = divmod(len(taken), len(lengths))
    assert counts.min() == passes
    assert (counts > passes).sum() == rest
    assert counts.max() <= passes + 1


@settings(deadline=None, max_examples=50)  # a busy machine is not a slow function
@given(LENGTHS, st.integers(1, 4), st.integers(1, 2))
def test_a_step_has_as_many_samples_of_seq_len_tokens_as_asked_for(
    lengths: list[int], micro_batches: int, micro_batch_size: int
) -> None:
    size = micro_batches * micro_batch_size
    config = DataConfig(batch_size=size, micro_batch_size=micro_batch_size, seq_len=20)
    for batch in islice(dealt(lengths, config), 8):
        assert size * 20 - 20 < batch.tokens <= size * 20
        rows = [len(row.token_ids) for row in batch.packing.micro_batches]
        assert sum(rows) == batch.tokens
        assert max(rows) <= micro_batch_size * 20


def test_stacked_samples_are_conversations() -> None:
    batches = list(islice(dealt([3, 9, 5, 7], DataConfig(batch_size=3, seq_len=20, pack_function="stack")), 4))
    assert [batch.samples for batch in batches] == [3, 3, 3, 3]
    assert sorted(index for batch in batches for index in seen(batch)) == sorted([0, 1, 2, 3] * 3)


@settings(deadline=None, max_examples=25)  # a busy machine is not a slow function
@given(LENGTHS, st.integers(1, 3), st.integers(1, 6))
def test_a_resumed_run_goes_on_where_it_stopped(lengths: list[int], batch_size: int, steps: int) -> None:
    config = DataConfig(batch_size=batch_size, seq_len=20, seed=1)
    whole = list(islice(dealt(lengths, config), steps + 5))
    saved = DataProgress.from_json(whole[steps - 1].progress.to_json())
    resumed = list(islice(dealt(lengths, config, progress=saved), 5))
    assert [seen(batch) for batch in resumed] == [seen(batch) for batch in whole[steps:]]
    assert [batch.progress for batch in resumed] == [batch.progress for batch in whole[steps:]]
    assert [batch.epoch for batch in resumed] == [batch.epoch for batch in whole[steps:]]


def test_epoch_counts_passes_over_the_data() -> None:
    batches = dealt([4, 4, 4, 4], DataConfig(batch_size=1, seq_len=8))
    assert [batch.epoch for batch in islice(batches, 4)] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_rows_without_anything_to_learn_are_left_out_and_counted(said: list[str]) -> None:
    batches = dealt([4, 1, 4, 1, 4], DataConfig(name="d", batch_size=1, seq_len=8))
    taken = [index for batch in islice(batches, 3) for index in seen(batch)]
    assert set(taken) == {0, 2, 4}
    assert said == ["d: 2 of 5 rows have nothing to learn"]


def test_data_without_anything_to_learn_is_refused_after_one_epoch() -> None:
    with pytest.raises(DataError, match="none of its 3 rows has a token to learn within seq_len 8"):
        next(dealt([1, 1, 1], DataConfig(batch_size=1, seq_len=8)))


def test_a_step_that_goes_through_the_data_several_times_is_warned_about_once(said: list[str]) -> None:
    list(islice(dealt([4, 4], DataConfig(batch_size=32, seq_len=8)), 3))
    assert said == [
        "one step goes through the data more than once: data.batch_size 32 is samples of data.seq_len 8 tokens; lower "
        "it, or give more data"
    ]


def test_the_realised_mixture_counts_samples_and_tokens_of_each_part() -> None:
    config = DataConfig(batch_size=1, seq_len=12)
    both = training_batches(drawn([3, 6], config, sizes=[1, 2]), config, parts={"short": "", "mixed": ""})
    batch = next(both)
    assert batch.progress.samples["short"] + batch.progress.samples["mixed"] == batch.samples
    assert batch.progress.tokens["short"] == 3 * batch.progress.samples["short"]
    ratios = batch.progress.ratios()
    assert ratios["progress/short/ratio_samples"] == batch.progress.samples["short"] / batch.samples
    assert ratios["progress/mixed/ratio_tokens"] == batch.progress.tokens["mixed"] / batch.tokens
    assert next(dealt([4], config)).progress.ratios() == {}
