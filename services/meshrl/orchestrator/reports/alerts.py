"""Looks in each step's record for the causes of trouble of `meshrl doctor`.

An alert is logged when it begins and when it ends. In between the step's record has `alert/NAME` = 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from loguru import logger

from meshrl.diagnosis.causes import CAUSES, RECENT, Ailment, Observed, diagnose
from meshrl.diagnosis.history import RunSeries

REMEMBERED = 200
"""Steps."""


class Alerts:
    """`synchronous`: the trainer waits for each batch by design."""

    def __init__(self, *, synchronous: bool, ignored: Collection[str] = ()) -> None:
        self._synchronous = synchronous
        self._causes = [cause for cause in CAUSES if cause.name not in ignored]
        self._series = RunSeries(most=REMEMBERED)
        self._last_seen: dict[str, int] = {}

    def check(
        self, step: int, metrics: Mapping[str, float], lags_s: Mapping[str, float]
    ) -> tuple[dict[str, float], list[Ailment]]:
        """Takes a step's record and how late the programs' event loops run; returns the `alert/` metrics and the new
        alerts. One not seen for RECENT steps is over."""
        self._series.take({**metrics, "step": step})
        run = Observed(columns=self._series.columns, synchronous=self._synchronous, loop_lags_s=lags_s)
        found = diagnose(run, self._causes)
        begun = [finding for finding in found if finding.cause not in self._last_seen]
        for finding in begun:
            logger.warning("alert {}: {}; {}", finding.cause, finding.evidence, finding.what_to_do)
        self._last_seen |= {finding.cause: step for finding in found}
        for name in sorted(name for name, seen in self._last_seen.items() if step - seen >= RECENT):
            logger.info("alert {} is over", name)
            del self._last_seen[name]
        return {f"alert/{name}": 1.0 for name in self._last_seen}, begun
