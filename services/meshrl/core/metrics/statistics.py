"""Statistics of many values."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class MovingMean:
    """Of the values so far, until they are `remembered`; then each moves it by one part in so many."""

    def __init__(self, remembered: int) -> None:
        self.value: float | None = None
        """None before the first."""
        self._remembered = remembered
        self._seen = 0

    def add(self, value: float) -> None:
        self._seen += 1
        before = value if self.value is None else self.value
        self.value = before + (value - before) / min(self._seen, self._remembered)


def distribution(name: str, values: Iterable[float], statistics: str) -> dict[str, float]:
    """`{name}/{statistic}` for each asked statistic (mean, std, max, min) of the finite values. Empty without."""
    finite = np.array([value for value in values if np.isfinite(value)], dtype=np.float64)
    if finite.size == 0:
        return {}
    computed = {"mean": finite.mean(), "std": finite.std(), "max": finite.max(), "min": finite.min()}
    return {f"{name}/{statistic}": float(computed[statistic]) for statistic in statistics.split()}


def spread(count: int, most: int) -> NDArray[np.intp]:
    """Places of at most `most` of `count` values, evenly spread; (min(count, most),)."""
    chosen = min(count, most)
    return np.arange(chosen, dtype=np.intp) * count // max(chosen, 1)
