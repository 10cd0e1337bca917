from typing import Any

import pytest

from meshrl.training.config import SchedulerConfig
from meshrl.training.lr_schedule import learning_rate


def rates(config: SchedulerConfig, max_steps: int | None, steps: int) -> list[float]:
    return [learning_rate(config, peak=1.0, step=step, max_steps=max_steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("keys", "max_steps", "expected"),
    [
        ({"warmup_steps": 4}, None, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (
            {"type": "linear", "warmup_steps": 2, "decay_steps": 4, "min_lr": 0.2},
            8,
            [0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
        ),
        ({"type": "cosine", "warmup_steps": 2, "min_lr": 0.1}, 6, [0.5, 1.0, 0.868198, 0.55, 0.231802, 0.1]),
        ({"type": "linear", "warmup_steps": 1, "decay_steps": 2}, None, [1.0, 0.5, 0.0, 0.0]),  # after the warmup
        ({"type": "wsd", "warmup_steps": 2, "decay_steps": 4}, 10, [0.5, 1, 1, 1, 1, 1, 0.5, 0.292893, 0.133975, 0, 0]),
    ],
)
def test_rates_of_each_schedule(keys: dict[str, Any], max_steps: int | None, expected: list[float]) -> None:
    found = rates(SchedulerConfig.model_validate(keys), max_steps, len(expected))
    assert found == pytest.approx(expected, abs=1e-6)


def test_decay_without_any_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scheduler\.decay_steps or max_steps"):
        SchedulerConfig(type="cosine").check_horizon(None)


def test_wsd_decays_over_the_last_tenth_unless_told() -> None:
    falls = [step for step, rate in enumerate(rates(SchedulerConfig(type="wsd"), 40, 40), start=1) if rate < 1.0]
    assert falls == [37, 38, 39, 40]
