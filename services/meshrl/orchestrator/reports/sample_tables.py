"""Tables of sampled texts, and histograms, of a step; made by the finisher, shown by the monitor beside metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import takewhile

from meshrl.core.config.shared import LogExtrasConfig
from meshrl.core.telemetry.monitor import Monitor, SampleRow
from meshrl.orchestrator.work.batches import AssembledBatch, SubmittedStep
from meshrl.orchestrator.work.screening import ReadyGroup
from meshrl.wire.types import Rollout

FEW_SAMPLES = 8
"""Rollouts in a table of samples whose share is not given."""


async def log_extras(monitor: Monitor, config: LogExtrasConfig | None, step: SubmittedStep) -> None:
    """Gives the monitor a step's samples and distributions, every `config.interval` steps; None asks for neither."""
    if config is None or step.step % config.interval != 0:
        return
    if config.samples:
        rows = sample_rows(step.groups, step.assembled, ratio=config.sample_ratio)
        await asyncio.to_thread(monitor.log_samples, step.step, rows)
    if config.distributions:
        values = {
            "distributions/reward": [rollout.reward for ready in step.groups for rollout in ready.kept],
            "distributions/advantage": list(step.assembled.advantages.values()),
        }
        await asyncio.to_thread(monitor.log_distributions, step.step, values)


def sample_rows(groups: Sequence[ReadyGroup], assembled: AssembledBatch, *, ratio: float | None) -> list[SampleRow]:
    """Rows for a table of samples: every 1/ratio-th rollout of the batch, or a few when no ratio is given."""
    rollouts = [rollout for ready in groups for rollout in ready.kept]
    count = min(FEW_SAMPLES, len(rollouts)) if ratio is None else max(1, round(ratio * len(rollouts)))
    chosen = [rollouts[index * len(rollouts) // count] for index in range(count)]
    return [
        SampleRow(
            environment=rollout.environment,
            task_key=rollout.task_key,
            prompt=_prompt(rollout),
            completion=rollout.completion,
            reward=rollout.reward,
            advantage=assembled.advantages.get(rollout.rollout_id),
        )
        for rollout in chosen
    ]


def _prompt(rollout: Rollout) -> str:
    """The messages before the first one of the policy, a line each."""
    spans = rollout.samples[0].message_spans if rollout.samples else ()
    return "\n".join(span.text for span in takewhile(lambda span: span.role != "assistant", spans))
