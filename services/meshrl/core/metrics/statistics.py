"""Statistics of many values under one metric's name; used by whoever makes a record of metrics."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def distribution(name: str, values: Iterable[float], statistics: str) -> dict[str, float]:
    """`{name}/{statistic}` for each asked statistic (of mean, std, max and min) of the finite values; empty without."""
    finite = np.array([value for value in values if np.isfinite(value)], dtype=np.float64)
    if finite.size == 0:
        return {}
    computed = {"mean": finite.mean(), "std": finite.std(), "max": finite.max(), "min": finite.min()}
    return {f"{name}/{statistic}": float(computed[statistic]) for statistic in statistics.split()}
