"""Submits `sft` as a SLURM job instead of running it here, when it has a [slurm] section."""

from __future__ import annotations

import os

from meshrl.core.config import ConfigError
from meshrl.core.run_folder import empty_folder
from meshrl.core.slurm.submit import BatchJob, submit
from meshrl.sft.config import SFTConfig
from meshrl.training.parallel.deployment import is_rank


def submit_sft(config: SFTConfig, dry_run: bool) -> str | None:
    """Writes the job and, unless it is a dry run, submits it; None where there is no [slurm]. Raises ConfigError."""
    given = config.deployment
    if config.slurm is None:
        if given.type == "multi_node" and not is_rank(os.environ):
            raise ConfigError(
                "deployment.type is 'multi_node', which sft does in a SLURM job; add [slurm], or start"
                " torchrun -m meshrl.sft.main on each node (docs/deployment.md)"
            )
        return None
    if config.slurm.requeue_at_limit and config.ckpt is None:
        raise ConfigError(
            "slurm.requeue_at_limit goes on from a checkpoint, and sft saves none; add [ckpt], or leave it out"
        )
    model = config.model
    if given.nodes_per_fsdp_group is not None:
        model = model.model_copy(update={"dp_replicate": given.num_train_nodes // given.nodes_per_fsdp_group})
    job = BatchJob(
        program="sft",
        module="meshrl.sft.main",
        config=config.model_copy(update={"slurm": None, "model": model, "dry_run": False, "clean_output_dir": False}),
        output_dir=config.output_dir,
        nodes=given.nodes,
        gpus_per_node=given.gpus_per_node,
        values={"ranks_per_node": max(1, given.gpus_per_node)},
    )
    if config.clean_output_dir and not config.dry_run:
        empty_folder(config.output_dir, keep=config.begins_with)
    return submit(job, config.slurm, dry_run=dry_run or config.dry_run)
