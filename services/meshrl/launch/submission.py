"""Submits a run as a SLURM job instead of starting it: `rl` with a [slurm] section."""

from __future__ import annotations

import itertools
from pathlib import Path

from meshrl.core.config import ConfigError, dump_toml
from meshrl.core.paths import Layout
from meshrl.core.run_folder import empty_folder
from meshrl.core.slurm.config import SlurmConfig
from meshrl.core.slurm.submit import BatchJob, submit
from meshrl.launch.compose import compose, key_environ
from meshrl.launch.config import RLConfig
from meshrl.launch.lock import FolderLock
from meshrl.launch.nodes.job import JobNode
from meshrl.launch.nodes.spread import spread_over

FIRST_PORT = 50051
"""In a dry run; the job takes free ports of its nodes."""


def submit_run(config: RLConfig, slurm: SlurmConfig) -> str:
    """Returns a message for the user. Raises ConfigError, also when sbatch refuses."""
    layout = Layout(config.output_dir)
    in_job = config.model_copy(update={"slurm": None, "dry_run": False, "clean_output_dir": False})
    # As it would be on nodes called node-0 and so on: raises ConfigError for what does not fit.
    ports, given = itertools.count(FIRST_PORT), config.deployment
    if given.type == "single_node":
        parts = compose(in_job, lambda _: next(ports), gpus=[str(gpu) for gpu in range(given.gpus_per_node)])
    elif given.nodes < 2 or config.inference is None:
        raise ConfigError(
            "deployment.type 'multi_node' starts engines on num_infer_nodes nodes, but inference is off; add"
            " [inference], or use 'single_node'"
        )
    else:
        names = [f"node-{number}" for number in range(given.nodes)]
        in_spread, spread = spread_over(in_job, [JobNode(name=name, address=name) for name in names])
        parts = compose(in_spread, lambda _: next(ports), placement=spread.placement)
    if slurm.requeue_at_limit and config.trainer.ckpt is None:
        raise ConfigError(
            "slurm.requeue_at_limit goes on from a checkpoint, and the trainer saves none; add [ckpt], or leave it out"
        )
    with FolderLock(layout):
        if config.clean_output_dir and not config.dry_run:
            empty_folder(config.output_dir, keep=[Path(config.trainer.model.name)])
        if config.dry_run:
            for part in parts:
                dump_toml(part.config, layout.config(part.name))
        job = BatchJob(
            program="rl",
            module="meshrl.launch.main",
            config=in_job,
            output_dir=config.output_dir,
            nodes=given.nodes,
            gpus_per_node=given.gpus_per_node,
            environ={}
            if config.inference is None
            else key_environ(config.inference.api_key, config.inference.api_key_var),
        )
        notes = "".join(f"note: {text}\n" for text in config.notes)
        return notes + submit(job, slurm, dry_run=config.dry_run)
