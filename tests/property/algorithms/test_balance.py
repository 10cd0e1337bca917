"""Samples divide among rows without loss, within capacity, and ranks wait no longer than they did sorted by tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.algorithms.balance import divide, waiting_cost

SEQ_LEN = 64
ANY = st.lists(st.integers(2, SEQ_LEN), min_size=1, max_size=60)
FULL_ROWS = st.lists(  # samples that fill rows to the last token: nearly the only way to divide them
    st.sampled_from([(64,), (40, 24), (33, 31), (30, 20, 14), (22, 21, 21), (16, 16, 16, 16), (50, 10, 4)]),
    min_size=1,
    max_size=20,
).map(lambda rows: [length for row in rows for length in row])
LENGTHS = ANY | FULL_ROWS
RANKS = st.integers(1, 5)
ATTENTION = st.sampled_from([0.0, 1 / 64, 1 / 16, 1.0])


def sorted_by_tokens(lengths: list[int], dp_size: int) -> list[list[int]]:
    """The scheme before costs: first-fit decreasing, halved until ranks share the rows, most tokens first."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fitting = (row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= SEQ_LEN)
        row = next(fitting, None)
        if row is None:
            rows.append(row := [])
        row.append(index)
    rows = [sorted(row) for row in rows]
    while len(rows) % dp_size and max(map(len, rows)) > 1:
        fullest = max(range(len(rows)), key=lambda row: (len(rows[row]), -row))
        rows[fullest : fullest + 1] = [rows[fullest][::2], rows[fullest][1::2]]
    return sorted(rows, key=lambda row: (-sum(lengths[index] for index in row), row))


@settings(max_examples=150, deadline=None)
@given(LENGTHS, RANKS, ATTENTION)
def test_every_sample_is_in_one_row_and_rows_keep_their_capacity(lengths, dp_size, attention) -> None:
    costs = [length + attention * length**2 for length in lengths]
    rows = divide(lengths, costs, seq_len=SEQ_LEN, dp_size=dp_size)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[index] for index in row) <= SEQ_LEN for row in rows)
    assert len(rows) % dp_size == 0 or all(len(row) == 1 for row in rows)
    assert len(rows) == len(sorted_by_tokens(lengths, dp_size))


@settings(max_examples=300, deadline=None)
@given(LENGTHS, RANKS, ATTENTION)
def test_ranks_never_wait_longer_than_when_rows_were_sorted_by_tokens(lengths, dp_size, attention) -> None:
    costs = [length + attention * length**2 for length in lengths]
    waits = waiting_cost(divide(lengths, costs, seq_len=SEQ_LEN, dp_size=dp_size), costs, dp_size)
    assert waits <= waiting_cost(sorted_by_tokens(lengths, dp_size), costs, dp_size) * (1 + 1e-12)
    assert waits >= sum(costs) / dp_size * (1 - 1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), RANKS, st.integers(2, 16))
def test_equal_samples_cost_every_rank_the_same(rows_each, dp_size, length) -> None:
    per_row = SEQ_LEN // length
    lengths = [length] * (rows_each * dp_size * per_row)
    costs = [length + 0.5 * length**2] * len(lengths)
    waits = waiting_cost(divide(lengths, costs, seq_len=SEQ_LEN, dp_size=dp_size), costs, dp_size)
    assert abs(waits - costs[0] * rows_each * per_row) < 1e-6 * waits
