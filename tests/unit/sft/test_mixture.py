"""The order in which the rows of one dataset or several are trained."""

from __future__ import annotations

from collections import Counter
from itertools import islice, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.sft.data.mixture import Cursor, Draw, Mixture


def epoch(mixture: Mixture, number: int = 0) -> list[Draw]:
    return list(takewhile(lambda draw: draw.cursor.epoch == number, mixture.draws(Cursor(epoch=number))))


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(SIZES, st.booleans())
def test_all_exhausted_sees_every_row_and_ends_with_the_last_one(sizes: list[int], weighed: bool) -> None:
    shares = [1 / len(sizes)] * len(sizes) if weighed else None
    draws = epoch(Mixture(sizes, probabilities=shares, seed=3))
    assert {(draw.part, draw.row) for draw in draws} == {(p, r) for p, size in enumerate(sizes) for r in range(size)}
    assert [draw.passed == 1.0 for draw in draws] == [False] * (len(draws) - 1) + [True]


@settings(deadline=None, max_examples=60)
@given(SIZES)
def test_first_exhausted_sees_no_row_twice_and_one_part_whole(sizes: list[int]) -> None:
    draws = epoch(Mixture(sizes, stopping_strategy="first_exhausted", seed=3))
    assert len({(draw.part, draw.row) for draw in draws}) == len(draws)
    counts = Counter(draw.part for draw in draws)
    assert [counts[part] == size for part, size in enumerate(sizes)].count(True) >= 1
    assert counts[draws[-1].part] == sizes[draws[-1].part]


@settings(deadline=None, max_examples=60)
@given(SIZES, st.integers(0, 30))
def test_the_order_goes_on_from_any_place(sizes: list[int], taken: int) -> None:
    whole = list(islice(Mixture(sizes, seed=5).draws(Cursor()), taken + 10))
    assert list(islice(Mixture(sizes, seed=5).draws(whole[taken].cursor), 10)) == whole[taken:]


def test_probabilities_are_kept_to() -> None:
    draws = list(islice(Mixture([50, 50, 50], probabilities=[0.6, 0.3, 0.1], seed=0).draws(Cursor()), 20_000))
    counts = Counter(draw.part for draw in draws)
    assert [counts[part] / 20_000 for part in range(3)] == pytest.approx([0.6, 0.3, 0.1], abs=0.02)


def test_without_probabilities_parts_take_turns() -> None:
    assert [draw.part for draw in islice(Mixture([5, 2], seed=0).draws(Cursor()), 6)] == [0, 1, 0, 1, 0, 1]


def test_epochs_differ_unless_the_order_is_kept() -> None:
    shuffled, kept = Mixture([20], seed=0), Mixture([20], seed=0, shuffle=False)
    assert [draw.row for draw in epoch(shuffled)] != [draw.row for draw in epoch(shuffled, 1)]
    assert [draw.row for draw in epoch(kept, 1)] == list(range(20))
