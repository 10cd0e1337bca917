"""The learning rate of a step as a pure function, so that the step number is all there is to resume."""

from __future__ import annotations

import math

from meshrl.training.config import SchedulerConfig


def learning_rate(config: SchedulerConfig, *, peak: float, step: int, max_steps: int | None) -> float:
    """Learning rate of `step` (from 1).

    Warm-up: peak * step / warmup_steps for the first warmup_steps. Decay: from peak to min_lr over decay_steps that
    end at max_steps (or that follow the warm-up when there is no end), linearly or along half a cosine; the last step
    has min_lr.
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.type == "constant":
        return peak
    if max_steps is None:
        assert config.decay_steps is not None  # SchedulerConfig.check_horizon
        start, length = config.warmup_steps, config.decay_steps
    else:
        length = min(config.decay_steps or max_steps, max(1, max_steps - config.warmup_steps))
        start = max_steps - length
    done = min(1.0, max(0.0, (step - start) / length))
    left = 1.0 - done if config.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    floor = min(config.min_lr, peak)
    return floor + (peak - floor) * left
