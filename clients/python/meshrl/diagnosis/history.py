"""A run's metrics as columns, for charts and for the causes of trouble."""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshrl.wire.growing_file import GrowingFile, json_records
from meshrl.wire.values import JsonObject

Points = tuple[list[float], list[float], list[int]]
"""x, values and steps of a curve."""


@dataclass
class Column:
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def points(self, most: int) -> tuple[list[int], list[float]]:
        """Of at most `most` stretches of equal length the last step and the mean."""
        count = len(self.steps)
        stretches = min(most, count)
        bounds = [count * place // stretches for place in range(stretches + 1)] if stretches else [0]
        steps, values = [], []
        for first, end in itertools.pairwise(bounds):
            steps.append(self.steps[end - 1])
            values.append(sum(self.values[first:end]) / (end - first))
        return steps, values


class RunSeries:
    """A column for each metric of a run's records."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: the newest points are kept of each metric. None keeps all."""
        self._most = most
        self.columns: dict[str, Column] = {}

    def take(self, record: Mapping[str, object]) -> None:
        """Adds a record, which has a `step`, without values that are not finite numbers."""
        step = record["step"]
        assert isinstance(step, int)
        columns = self.columns
        for name, value in record.items():
            if type(value) is not float and not isinstance(value, int | float):  # the former is fast, and most are
                continue
            if name == "step" or not math.isfinite(value):
                continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = Column()
            column.steps.append(step)
            column.values.append(value)
            if self._most is not None and len(column.steps) >= 2 * self._most:
                del column.steps[: -self._most], column.values[: -self._most]


class MetricsHistory:
    """The series of one metrics.jsonl from an offset on; not for several threads."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._file = GrowingFile(path, offset)
        self.series = RunSeries()
        self.last: JsonObject | None = None
        """Of a step."""

    @property
    def names(self) -> list[str]:
        return sorted(self.series.columns)

    def read_on(self) -> bool:
        """Reads new whole lines; returns whether any came. A file that shrank is read anew."""
        if self._file.shrank():
            self.series, self.last = RunSeries(), None
        before = self._file.offset
        for record in json_records(self._file.read_on()):
            if not isinstance(record.get("step"), int):
                continue
            self.series.take(record)
            if "time/step" in record:
                self.last = record
        return self._file.offset != before

    def points(self, names: Iterable[str], most: int, along: str = "step") -> dict[str, Points]:
        """At most `most` points of each written metric.

        x is the step, or the run's total until then: trained "tokens", or "time" in seconds of its steps.
        """
        columns = self.series.columns
        x_of = self._along(along)
        found = {}
        for name in names:
            if name in columns:
                steps, values = columns[name].points(most)
                found[name] = ([x_of(step) for step in steps], values, steps)
        return found

    def _along(self, along: str) -> Callable[[int], float]:
        if along == "step":
            return float
        column = self.series.columns.get("progress/tokens" if along == "tokens" else "time/step", Column())
        so_far = list(column.values if along == "tokens" else itertools.accumulate(column.values))

        def at(step: int) -> float:
            place = bisect_right(column.steps, step)
            return so_far[place - 1] if place else 0.0

        return at
