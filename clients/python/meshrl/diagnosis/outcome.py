"""What a run came to and what it cost: shown at its end and by `meshrl report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshrl.diagnosis.history import Column


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    steps: int
    rollouts: int
    seconds: float
    devices: int
    price: float | None = None
    """Of one device for an hour."""

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
    """None for a run without a step. `shared`: engines and trainer work on the same devices."""

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
        steps=len(times.values),
        rollouts=int(last("progress/samples")),
        seconds=sum(times.values),
        devices=max(ranks, of_engines) if shared else ranks + of_engines,
        price=price,
    )
