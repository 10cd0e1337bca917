"""Samples and distributions of a step, every so many steps, as the monitor's sinks get them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from meshrl.core.config.shared import LogExtrasConfig
from meshrl.core.metrics.statistics import spread
from meshrl.core.telemetry.monitor import Monitor, SampleRow
from meshrl.orchestrator.reports.sample_tables import log_extras
from meshrl.orchestrator.work.batches import AssembledBatch, SubmittedStep
from meshrl.orchestrator.work.screening import StepTally
from meshrl.wire.types import Batch, StepEvent, StepState


class Kept:
    """A sink that keeps what it is given, by step."""

    def __init__(self) -> None:
        self.samples: dict[int, list[SampleRow]] = {}
        self.distributions: dict[int, Mapping[str, Sequence[float]]] = {}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def write_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self.samples[step] = list(rows)

    def write_distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        self.distributions[step] = values

    def close(self) -> None:
        pass


@pytest.fixture
def submitted(make_group, make_rollout) -> SubmittedStep:
    rollouts = tuple(make_rollout(f"r{place}", reward=float(place)) for place in range(12))
    return SubmittedStep(
        step=2,
        groups=(replace(make_group("g0", rollouts, size=12), kept=rollouts),),
        assembled=AssembledBatch(
            batch=Batch(run_id="main", step=2, micro_batches=(), loss_tokens=1, environments=("echo",)),
            advantages={"r0": -1.5, "r11": 1.5},
            untrainable=frozenset(),
            truncated_samples=0,
            dropped_samples=0,
            dp_size=1,
        ),
        tally=StepTally(),
    )


async def test_entropies_of_the_trainer_are_among_the_distributions(submitted: SubmittedStep) -> None:
    sink, config = Kept(), LogExtrasConfig(interval=2, sample_ratio=0.25)
    monitor = Monitor([sink])
    done = StepEvent(revision=1, step=2, state=StepState.DONE, entropies=np.array([0.5, 1.5], dtype=np.float32))
    await log_extras(monitor, config, submitted, done)
    await log_extras(monitor, config, replace(submitted, step=3), done)
    await log_extras(monitor, None, submitted, done)
    assert sink.distributions == {
        2: {
            "distributions/reward": [float(place) for place in range(12)],
            "distributions/advantage": [-1.5, 1.5],
            "distributions/entropy": [0.5, 1.5],
        }
    }
    assert {step: [row.reward for row in rows] for step, rows in sink.samples.items()} == {2: [0.0, 4.0, 8.0]}
    await log_extras(monitor, config, submitted, replace(done, entropies=None))  # an event that was seen late
    assert "distributions/entropy" not in sink.distributions[2]


@pytest.mark.parametrize(("count", "most", "places"), [(0, 8, []), (3, 8, [0, 1, 2]), (10, 4, [0, 2, 5, 7])])
def test_places_are_spread_evenly(count: int, most: int, places: list[int]) -> None:
    assert spread(count, most).tolist() == places
