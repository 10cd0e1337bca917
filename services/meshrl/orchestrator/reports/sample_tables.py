"""Sample tables and distributions of a step: what a monitor shows beside the record, every so many steps."""

from __future__ import annotations

import asyncio

from meshrl.core.config.shared import LogExtrasConfig
from meshrl.core.telemetry.monitor import Monitor
from meshrl.orchestrator.reports import step_record as record
from meshrl.orchestrator.work.batches import SubmittedStep


async def log_extras(monitor: Monitor, config: LogExtrasConfig | None, step: SubmittedStep) -> None:
    """Hands a step's samples and distributions to the monitor when its turn has come; None asks for neither."""
    if config is None or step.step % config.interval != 0:
        return
    if config.samples:
        rows = record.sample_rows(step.groups, step.assembled, ratio=config.sample_ratio)
        await asyncio.to_thread(monitor.log_samples, step.step, rows)
    if config.distributions:
        values = record.distributions(step.groups, step.assembled)
        await asyncio.to_thread(monitor.log_distributions, step.step, values)
