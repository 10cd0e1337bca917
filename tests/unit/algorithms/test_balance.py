from meshrl.algorithms.balance import divide, sample_cost, waiting_cost


def test_one_long_sample_costs_more_than_as_many_tokens_of_short_ones() -> None:
    assert sample_cost(16_384) == 2 * 16_384
    assert sample_cost(100) > 10 * sample_cost(10)


def test_ranks_share_by_cost_not_by_tokens() -> None:
    lengths = [40, 10, 10, 10, 10, 30, 10]  # first-fit: [40, 10, 10] and [30, 10, 10, 10], as many tokens each
    costs = [length + length**2 for length in lengths]
    rows = divide(lengths, costs, seq_len=90, dp_size=2)
    assert rows == [[0], [1, 2, 3, 4, 5, 6]]
    assert waiting_cost(rows, costs, 2) == 1640
    assert waiting_cost([[0, 1, 2], [3, 4, 5, 6]], costs, 2) == 1860


def test_rows_beside_a_very_long_sample_are_filled_up_to_it() -> None:
    lengths = [100] + [20] * 15
    rows = divide(lengths, lengths, seq_len=100, dp_size=2)
    assert waiting_cost(rows, lengths, 2) == 200  # of 400 tokens over two ranks


def test_like_rows_stand_at_the_same_micro_step() -> None:
    rows = divide([50, 9, 48, 8], [50, 9, 48, 8], seq_len=50, dp_size=2)
    assert rows == [[0], [2], [1], [3]]


def test_one_rank_keeps_first_fit_decreasing() -> None:
    assert divide([6, 4, 3], [6, 4, 3], seq_len=10, dp_size=1) == [[0, 1], [2]]
