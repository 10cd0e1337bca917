"""A run's outcome, cost and slower half, for its end, `meshrl report` and `meshrl doctor`."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from meshrl.diagnosis.causes import MOST_WAITING, Observed, empty_slots, idle_engines, starved_trainer
from meshrl.diagnosis.history import Column

BUSY = 0.05
"""A half that waits less of its time is busy."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """`devices` are the GPUs, or CPUs in their place, that worked for `seconds` of training."""

    steps: int
    rollouts: int
    seconds: float
    devices: int
    price: float | None = None
    """Per device-hour."""

    @property
    def device_hours(self) -> float:
        return self.devices * self.seconds / 3600.0

    def line(self) -> str:
        parts = [self._cost(self.device_hours)]
        if self.rollouts:
            parts.append(f"{self._cost(self.device_hours * 1000 / self.rollouts)} per 1,000 rollouts")
        if self.steps:
            parts.append(f"{self._cost(self.device_hours / self.steps)} per step")
        return (
            f"{self.steps} steps and {self.rollouts} rollouts in {self.seconds:.0f} s on {self.devices} devices:"
            f" {', '.join(parts)}"
        )

    def _cost(self, device_hours: float) -> str:
        hours = f"{device_hours:.3g} device-hours"
        return hours if self.price is None else f"{hours} at a cost of {device_hours * self.price:.3g}"


def outcome_of(
    columns: Mapping[str, Column], *, devices_per_engine: int = 1, shared: bool = False, price: float | None = None
) -> RunOutcome | None:
    """None without a step. `shared`: engines and trainer have the same devices."""

    def last(name: str, otherwise: float = 0.0) -> float:
        column = columns.get(name)
        return otherwise if column is None or not column.values else column.values[-1]

    times = columns.get("time/step")
    if times is None:
        return None
    rate = last("perf/throughput_per_gpu")
    ranks = round(last("perf/throughput") / rate) if rate else 1
    engines = columns.get("weights/engines")
    of_engines = int(max(engines.values)) * devices_per_engine if engines is not None else 0
    return RunOutcome(
        # One that was done again is one step, and costs both times; those beyond the last were undone.
        steps=len({step for step in times.steps if step <= times.steps[-1]}),
        rollouts=int(last("progress/samples")),
        seconds=sum(times.values),
        devices=max(ranks, of_engines) if shared else ranks + of_engines,
        price=price,
    )


def slower_half(run: Observed) -> str:
    """With the share of the time that each half waited and the key that moves it; "" if the metrics lack them. The
    first step warms up and does not count."""
    names = ("time/wait_for_batch", "time/train_step", "perf/engines_idle", "time/step")
    columns = [
        dict(zip(column.steps, column.values, strict=True)) for name in names if (column := run.columns.get(name))
    ]
    steps = sorted(set.intersection(*map(set, columns)))[1:] if len(columns) == len(names) else []
    if not steps:
        return ""
    waits_s, trains_s, idle, steps_s = ([column[step] for step in steps] for column in columns)
    trainer = min(1.0, sum(waits_s) / (sum(trains_s) or 1.0))
    engines = sum(map(operator.mul, idle, steps_s)) / (sum(steps_s) or 1.0)
    shares = f"the trainer waited for batches for {trainer:.0%} of the time, no rollout was out for {engines:.0%} of it"
    if max(trainer, engines) <= BUSY:
        return f"both halves were busy: {shares}"
    if run.synchronous:
        return f"the halves took turns: {shares}; orchestrator.max_async_level: 1 lets both work at once"
    if engines > trainer:
        cause = idle_engines
    elif statistics.fmean(run.values("perf/idle_slots") or [0.0]) > MOST_WAITING:
        cause = empty_slots
    else:
        cause = starved_trainer
    half = "trainer" if engines > trainer else "engines"
    return f"the slower half was the {half}: {shares}; {cause.key}: {cause.remedy}"
