"""The catalogue of metrics, which `names` declares; records are made through it.

A record is filled by one program (sft), or by two (the orchestrator adds the trainer's metrics of a step).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class Source(enum.Enum):
    ORCHESTRATOR = "orchestrator"
    TRAINER = "trainer"
    SFT = "sft"
    EVAL = "eval"


class UndeclaredMetricError(Exception):
    """A program fills a name that is not declared, or is another's."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, or one for each value of the `{placeholders}` in its name, and for each of its statistics, such as
    `{name}/mean`. `sent_as` is its name in the trainer's event of a step."""

    name: str
    unit: str
    meaning: str
    filled_by: tuple[Source, ...]
    statistics: tuple[str, ...] = ()
    sent_as: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}/{statistic}" for statistic in self.statistics) or (self.name,)

    @property
    def exported(self) -> str:
        words = re.findall(r"[A-Za-z0-9]+", re.sub(r"\{\w+\}", "", self.name))
        return "_".join(["meshrl", *words])


class Catalogue:
    """Raises ValueError for a name declared twice, or filled by orchestrator and trainer."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = tuple(metrics)
        self._exact: dict[str, Metric] = {}
        self._sent = {metric.sent_as: metric for metric in self.metrics if metric.sent_as}
        self._patterns: list[tuple[re.Pattern[str], str, Metric]] = []
        declared: set[str] = set()
        for metric in self.metrics:
            if {Source.ORCHESTRATOR, Source.TRAINER} <= set(metric.filled_by):
                raise ValueError(f"metric {metric.name!r} cannot be filled by both: they fill the same records")
            for name in metric.names:
                if name in declared:
                    raise ValueError(f"metric {name!r} is declared twice")
                declared.add(name)
                if "{" in name:
                    parts = re.split(r"\{(\w+)\}", name)  # every second one is a placeholder
                    groups = [f"(?P<{part}>.*)" if place % 2 else re.escape(part) for place, part in enumerate(parts)]
                    statistic = name.removeprefix(metric.name).removeprefix("/")
                    self._patterns.append((re.compile("".join(groups), re.DOTALL), statistic, metric))
                else:
                    self._exact[name] = metric

    def find(self, name: str) -> Metric | None:
        found = self.parts(name)
        return None if found is None else found[0]

    def parts(self, name: str) -> tuple[Metric, dict[str, str]] | None:
        """A name's declaration, with its placeholders' values and statistic."""
        if (metric := self._exact.get(name)) is not None:
            statistic = name.removeprefix(metric.name).removeprefix("/")
            return metric, {"statistic": statistic} if statistic else {}
        for pattern, statistic, metric in self._patterns:
            if (match := pattern.fullmatch(name)) is not None:
                return metric, {**match.groupdict(), "statistic": statistic} if statistic else match.groupdict()
        return None

    def record(self, source: Source, values: Mapping[str, float]) -> dict[str, float]:
        """Raises UndeclaredMetricError."""
        for name in values:
            metric = self.find(name)
            if source is Source.TRAINER:
                metric = self._sent.get(name, metric)
            if metric is None:
                raise UndeclaredMetricError(
                    f"metric {name!r} of the {source.value} is not declared; add its name, unit and meaning to"
                    " meshrl.core.metrics.names"
                )
            if source not in metric.filled_by:
                owners = " and ".join(owner.value for owner in metric.filled_by)
                raise UndeclaredMetricError(
                    f"metric {name!r} is filled by {owners}, not by {source.value}; give the new one a name of its own"
                )
        return dict(values)
