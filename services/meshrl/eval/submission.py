"""Submits `eval` as a SLURM job instead of running it here, when it has a [slurm] section."""

from __future__ import annotations

from meshrl.core.slurm.submit import BatchJob, submit
from meshrl.eval.config import EvaluationConfig


def submit_eval(config: EvaluationConfig, dry_run: bool) -> str | None:
    """Writes the job and, unless it is a dry run, submits it; None where there is no [slurm]. Raises ConfigError."""
    if config.slurm is None:
        return None
    job = BatchJob(
        program="eval",
        module="meshrl.eval.main",
        config=config.model_copy(update={"slurm": None}),
        output_dir=config.output_dir,
        gpus_per_node=config.deployment.gpus_per_node,
    )
    return submit(job, config.slurm, dry_run=dry_run)
