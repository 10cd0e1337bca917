"""Statistics of many values under one metric's name."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


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
