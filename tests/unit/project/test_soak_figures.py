"""The rules by which the soak calls a figure flat."""

import os
from pathlib import Path

import pytest

from soak_figures import Rule, Sample, judge, look_at

STEPS = range(3, 1800, 3)


def is_flat(kind: str, bound: float, value) -> bool:
    samples = [Sample(step=step, at_s=0.0, processes={}, disk={"x": value(step)}) for step in STEPS]
    verdict = judge(Rule(figure="disk x", kind=kind, bound=bound), samples, after=200, shown=[200, 1800])
    assert verdict is not None
    return verdict.flat


def saw(step: int) -> float:
    """Memory between two collections of garbage."""
    return 500_000 + step * 137 % 18_000


@pytest.mark.parametrize(
    ("kind", "bound", "value", "flat"),
    [
        ("level", 1.0, lambda step: 500.0, True),
        ("level", 1.0, lambda step: 500.0 + 3 * step, False),
        ("level", 1.0, lambda step: 500.0 + 100 * min(step, 150), True),
        ("level", 1.0, saw, True),
        ("level", 1.0, lambda step: saw(step) + 12 * step, False),
        ("level", 0.005, lambda step: 50 + (step > 900), True),
        ("level", 0.005, lambda step: 50 + step // 50, False),
        ("total", 1.35, lambda step: 7 * step, True),
        ("total", 1.35, lambda step: step * step, False),
        ("bounded", 900.0, lambda step: min(2 * step, 800), True),
        ("bounded", 900.0, lambda step: 2 * step, False),
    ],
)
def test_growth_is_told_from_a_start_a_sawtooth_and_a_single_jump(kind, bound, value, flat) -> None:
    assert is_flat(kind, bound, value) is flat


def test_a_figure_that_was_hardly_seen_has_no_verdict() -> None:
    samples = [Sample(step=step, at_s=0.0, processes={}, disk={"x": 1}) for step in (1, 201, 202)]
    assert judge(Rule(figure="disk x", kind="level", bound=1.0), samples, after=200, shown=[200]) is None


def test_a_process_is_read_whole_and_one_that_is_gone_is_none(tmp_path: Path) -> None:
    before = look_at(os.getpid())
    with (tmp_path / "open").open("w"):
        during = look_at(os.getpid())
    assert before is not None
    assert during is not None
    assert during.files["file"] == before.files["file"] + 1
    assert during.own_kb + during.mapped_kb == pytest.approx(during.rss_kb, rel=0.05)
    assert during.threads >= 1
    assert look_at(2**22 + 1) is None
