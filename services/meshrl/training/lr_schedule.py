"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from meshrl.training.config import SchedulerConfig


def learning_rate(config: SchedulerConfig, *, peak: float, step: int, max_steps: int | None) -> float:
    """Learning rate of `step` (from 1).

    Warm-up: peak * step / warmup_steps. Decay: from peak to min_lr over decay_steps that end at max_steps (or follow
    the warm-up when there is no end), linearly, along half a cosine, or for wsd (warm-up, stable, decay, arXiv
    2404.06395) by one minus the square root of the way gone (arXiv 2405.18392), by default over the last tenth.
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.type == "constant":
        return peak
    if max_steps is None:
        assert config.decay_steps is not None  # SchedulerConfig.check_horizon
        start, length = config.warmup_steps, config.decay_steps
    else:
        after_warmup = max(1, max_steps - config.warmup_steps)
        unset = max(1, after_warmup // 10) if config.type == "wsd" else after_warmup
        length = min(config.decay_steps or unset, after_warmup)
        start = max_steps - length
    done = min(1.0, max(0.0, (step - start) / length))
    shapes = {"linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done)), "wsd": 1.0 - math.sqrt(done)}
    left = shapes[config.type]
    floor = min(config.min_lr, peak)
    return floor + (peak - floor) * left
