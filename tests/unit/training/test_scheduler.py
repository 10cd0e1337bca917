import pytest

from meshrl.training.config import SchedulerConfig
from meshrl.training.lr_schedule import learning_rate


def rates(config: SchedulerConfig, max_steps: int | None, steps: int) -> list[float]:
    return [learning_rate(config, peak=1.0, step=step, max_steps=max_steps) for step in range(1, steps + 1)]


def test_constant_rate_after_warmup() -> None:
    assert rates(SchedulerConfig(warmup_steps=4), None, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_over_the_last_steps() -> None:
    config = SchedulerConfig(type="linear", warmup_steps=2, decay_steps=4, min_lr=0.2)
    assert rates(config, 8, 9) == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_decay_starts_after_warmup_and_ends_at_min_lr() -> None:
    config = SchedulerConfig(type="cosine", warmup_steps=2, min_lr=0.1)
    assert rates(config, 6, 6) == pytest.approx([0.5, 1.0, 0.868198, 0.55, 0.231802, 0.1], abs=1e-6)


def test_without_an_end_decay_follows_the_warmup() -> None:
    config = SchedulerConfig(type="linear", warmup_steps=1, decay_steps=2)
    assert rates(config, None, 4) == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_decay_without_any_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scheduler\.decay_steps or max_steps"):
        SchedulerConfig(type="cosine").check_horizon(None)


def test_wsd_stays_at_the_peak_and_falls_by_a_square_root() -> None:
    config = SchedulerConfig(type="wsd", warmup_steps=2, decay_steps=4)
    assert rates(config, 10, 11) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.5, 0.292893, 0.133975, 0, 0], abs=1e-6)


def test_wsd_decays_over_the_last_tenth_unless_told() -> None:
    falls = [step for step, rate in enumerate(rates(SchedulerConfig(type="wsd"), 40, 40), start=1) if rate < 1.0]
    assert falls == [37, 38, 39, 40]
