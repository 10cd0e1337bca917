"""What a program has loaded is hidden from the collector, and garbage made beside it is found however much that is."""

import gc
from collections import deque
from collections.abc import Iterator

import pytest

from meshrl.core.heap import freeze_loaded, loading

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
    gc.freeze()  # as it was for all tests


def test_cycles_do_not_pile_up_beside_what_is_loaded(loaded):
    freeze_loaded()
    in_use, most = deque(maxlen=IN_USE), 0
    for _ in range(MADE):
        in_use.append(Cycle())
        most = max(most, Cycle.living)
    assert most < IN_USE + FULL_COLLECTION
    assert gc.get_freeze_count() >= LOADED


def test_the_collector_does_not_look_at_what_was_imported_in_loading(loaded, tmp_path, monkeypatch):
    (tmp_path / "mesh_unit_long_import.py").write_text(f"THINGS = [[] for _ in range({LOADED})]\n")
    monkeypatch.syspath_prepend(tmp_path)
    gc.unfreeze()
    with loading():
        assert not gc.isenabled()
        import mesh_unit_long_import  # type: ignore[import-not-found]  # made above
    assert gc.isenabled()
    assert len(mesh_unit_long_import.THINGS) == LOADED
    assert gc.get_freeze_count() >= LOADED


def test_loading_what_is_there_already_hides_nothing(loaded):
    gc.unfreeze()
    with loading():
        import gc as _  # noqa: F401  # it is imported
    assert gc.get_freeze_count() == 0
