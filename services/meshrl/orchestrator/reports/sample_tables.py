"""Tables of sampled texts, and histograms, of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import takewhile

from meshrl.core.config.shared import LogExtrasConfig
from meshrl.core.metrics.statistics import spread
from meshrl.core.telemetry.monitor import Monitor, SampleRow
from meshrl.orchestrator.work.batches import AssembledBatch, SubmittedStep
from meshrl.sampling.groups import RolloutGroup
from meshrl.wire.types import Rollout, StepEvent


async def log_extras(monitor: Monitor, config: LogExtrasConfig | None, step: SubmittedStep, done: StepEvent) -> None:
    """Every `config.interval` steps; None gives neither."""
    if config is None or step.step % config.interval != 0:
        return
    if config.samples:
        rows = sample_rows(step.groups, step.assembled, config)
        await asyncio.to_thread(monitor.log_samples, step.step, rows)
    if config.distributions:
        values = {
            "distributions/reward": [rollout.reward for group in step.groups for rollout in group.kept],
            "distributions/advantage": list(step.assembled.advantages.values()),
        }
        if done.entropies is not None:
            values["distributions/entropy"] = done.entropies.tolist()
        await asyncio.to_thread(monitor.log_distributions, step.step, values)


def sample_rows(groups: Sequence[RolloutGroup], assembled: AssembledBatch, config: LogExtrasConfig) -> list[SampleRow]:
    """Evenly spread over the batch's rollouts."""
    rollouts = [rollout for group in groups for rollout in group.kept]
    chosen = [rollouts[place] for place in spread(len(rollouts), config.rows_of(len(rollouts)))]
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
    spans = rollout.samples[0].message_spans if rollout.samples else ()
    return "\n".join(span.text for span in takewhile(lambda span: span.role != "assistant", spans))
