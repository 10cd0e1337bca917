"""Garbage in reference cycles is found while a program runs, however much it has loaded."""

import gc
from collections import deque
from collections.abc import Iterator

import pytest

from meshrl.core.heap import freeze_loaded

LOADED = 100_000
MADE = 20_000  # less than a quarter of what is loaded
IN_USE = 2_000  # long enough to reach the oldest generation before they are let go
FULL_COLLECTION = 10_000  # allocations until one; the thresholds of this test make it 11 * 11 * 70


class Cycle:
    """Counts how many of it live."""

    living = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.living += 1

    def __del__(self) -> None:
        Cycle.living -= 1


@pytest.fixture
def loaded() -> Iterator[list[list[int]]]:
    thresholds = gc.get_threshold()
    gc.set_threshold(70, 10, 10)  # a tenth of those of Python 3.12, as all counts here are
    yield [[] for _ in range(LOADED)]
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as it was for all tests


def test_cycles_do_not_pile_up_beside_what_is_loaded(loaded):
    freeze_loaded()
    in_use, most = deque(maxlen=IN_USE), 0
    for _ in range(MADE):
        in_use.append(Cycle())
        most = max(most, Cycle.living)
    assert most < IN_USE + FULL_COLLECTION
    assert gc.get_freeze_count() >= LOADED
