"""The learning rate stays in its bounds, rises once and falls once, whatever the settings."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshrl.training.config import SchedulerConfig
from meshrl.training.lr_schedule import learning_rate

Kind = Literal["constant", "linear", "cosine", "wsd"]
kinds = st.sampled_from(["constant", "linear", "cosine", "wsd"])
steps = st.integers(min_value=1, max_value=40)
PEAK = 0.5


@settings(deadline=None)
@given(
    kind=kinds,
    warmup=st.integers(min_value=0, max_value=50),
    decay=st.none() | steps,
    end=st.none() | steps,
    low=st.sampled_from([0.0, 0.1, 0.5, 2.0]),
)
def test_rate_rises_to_its_peak_stays_and_falls_to_its_floor(
    kind: Kind, warmup: int, decay: int | None, end: int | None, low: float
) -> None:
    config = SchedulerConfig(type=kind, warmup_steps=warmup, decay_steps=decay, min_lr=low)
    try:
        config.check_horizon(end)
    except ValueError:
        assume(False)
    last = end if end is not None else warmup + (decay or 0) + 1
    rates = [learning_rate(config, peak=PEAK, step=step, max_steps=end) for step in range(1, last + 1)]
    assert all(0.0 <= rate <= PEAK for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == pytest.approx([PEAK * step / warmup for step in range(1, len(rising) + 1)])
    assert all(later <= earlier for earlier, later in pairwise(falling))
    if falling:
        assert falling[-1] == pytest.approx(PEAK if kind == "constant" else min(low, PEAK))
    after = learning_rate(config, peak=PEAK, step=last + 1000, max_steps=end)
    assert after == pytest.approx(PEAK if kind == "constant" else min(low, PEAK))
