import pytest

from meshrl.algorithms.balance import SampleCost, divide, waiting_cost


def test_one_long_sample_costs_more_than_as_many_tokens_of_short_ones() -> None:
    cost = SampleCost(linear=1.0, attention=0.1)
    assert cost(100) == 100 + 0.1 * 10000
    assert cost(100) > 10 * cost(10)


def test_ranks_share_by_cost_not_by_tokens() -> None:
    lengths = [40, 10, 10, 10, 10, 30, 10]  # first-fit: [40, 10, 10] and [30, 10, 10, 10], as many tokens each
    cost = SampleCost(attention=1.0)
    costs = [cost(length) for length in lengths]
    rows = divide(lengths, seq_len=90, dp_size=2, cost=cost)
    assert rows == [[0], [1, 2, 3, 4, 5, 6]]
    assert waiting_cost(rows, costs, 2) == 1640
    assert waiting_cost([[0, 1, 2], [3, 4, 5, 6]], costs, 2) == 1860


def test_rows_beside_a_very_long_sample_are_filled_up_to_it() -> None:
    lengths = [100] + [20] * 15
    cost = SampleCost(attention=0.0)
    rows = divide(lengths, seq_len=100, dp_size=2, cost=cost)
    assert waiting_cost(rows, [cost(length) for length in lengths], 2) == 200  # of 400 tokens over two ranks


def test_like_rows_stand_at_the_same_micro_step() -> None:
    rows = divide([50, 9, 48, 8], seq_len=50, dp_size=2, cost=SampleCost())
    assert rows == [[0], [2], [1], [3]]


def test_one_rank_keeps_first_fit_decreasing() -> None:
    assert divide([6, 4, 3], seq_len=10, dp_size=1, cost=SampleCost()) == [[0, 1], [2]]


def test_a_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="a sample of 11 tokens does not fit into a row of 10"):
        divide([3, 11], seq_len=10, dp_size=1, cost=SampleCost())


def test_costs_must_make_sense() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        SampleCost(attention=-1.0)
    with pytest.raises(ValueError, match="nor both 0"):
        SampleCost(linear=0.0, attention=0.0)
