"""The `sft` program: one rank, the agent that starts the ranks, or the submission of a job."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from meshrl.core.config import ConfigError, dump_toml, load_config
from meshrl.core.paths import Layout
from meshrl.core.run_folder import empty_folder, writing_to
from meshrl.core.slurm.submit import BatchJob, submit
from meshrl.core.telemetry.log_folder import BEGUN, begin_attempt
from meshrl.prime_rl import PrimeRLKeys
from meshrl.sft.config import SFTConfig, TextSettings
from meshrl.sft.data.config import DataConfig
from meshrl.training.parallel.deployment import is_rank
from meshrl.training.parallel.rank_main import rank_main

if TYPE_CHECKING:
    from meshrl.sft.data.check import DataCheck


def main() -> None:
    rank_main(
        "sft",
        lambda: load_config(SFTConfig, prog="sft", instead=submit_sft, spellings=PrimeRLKeys(SFTConfig, "sft")),
        prepare=_prepare,
    )


def submit_sft(config: SFTConfig, dry_run: bool) -> str | None:
    """Writes a SLURM job and submits it unless `dry_run`. None without [slurm]. Raises ConfigError."""
    given = config.deployment
    if config.slurm is None:
        if given.type == "multi_node" and not is_rank(os.environ):
            raise ConfigError(
                "deployment.type is 'multi_node', which sft does in a SLURM job; add [slurm], or start"
                " torchrun -m meshrl.sft.main on each node (docs/deployment.md)"
            )
        if given.nodes_per_fsdp_group is not None:
            raise ConfigError(
                "deployment.nodes_per_fsdp_group is for [slurm]; set model.dp_replicate instead, to"
                f" {given.num_train_nodes // given.nodes_per_fsdp_group}"
            )
        return None
    if config.slurm.requeue_at_limit and config.ckpt is None:
        raise ConfigError(
            "slurm.requeue_at_limit goes on from a checkpoint, and sft saves none; add [ckpt], or leave it out"
        )
    changes: dict[str, object] = {"slurm": None, "dry_run": False, "clean_output_dir": False}
    if given.nodes_per_fsdp_group is not None:
        copies = given.num_train_nodes // given.nodes_per_fsdp_group
        changes["model"] = config.model.model_copy(update={"dp_replicate": copies})
        changes["deployment"] = given.model_copy(update={"nodes_per_fsdp_group": None})
    job = BatchJob(
        program="sft",
        module="meshrl.sft.main",
        config=config.model_copy(update=changes),
        output_dir=config.output_dir,
        nodes=given.nodes,
        gpus_per_node=given.gpus_per_node,
        values={"ranks_per_node": max(1, given.gpus_per_node)},
    )
    if config.clean_output_dir and not config.dry_run:
        empty_folder(config.output_dir, keep=config.begins_with)
    return submit(job, config.slurm, dry_run=dry_run or config.dry_run)


def _prepare(config: SFTConfig) -> None:
    """Carries out --dry-run, which ends the process, or --clean-output-dir, and begins the logs."""
    try:
        if not config.dry_run:
            with writing_to(config.output_dir):
                if config.clean_output_dir:
                    empty_folder(config.output_dir, keep=config.begins_with)
                if BEGUN not in os.environ:
                    begin_attempt(Layout(config.output_dir))
            return
        checks = []
        if config.bench is None:  # which makes its rows
            checks = _first_rows(config.text, config.data, show=config.show_rows, validated=config.validated)
        sys.stdout.writelines(f"note: {note}\n" for note in config.notes)
        sys.stdout.writelines(f"{line}\n" for check in checks for line in check.lines())
        sys.stdout.writelines(f"warning: {doubt}\n" for doubt in config.doubts())
        path = Layout(config.output_dir).config("sft")
        with writing_to(config.output_dir):
            dump_toml(config.model_copy(update={"clean_output_dir": False, "dry_run": False}), path)
        sys.stdout.write(f"dry run: the configuration is valid; the resolved file is {path}\n")
        sys.exit(0)
    except ConfigError as error:
        sys.stderr.write(f"sft: {error}\n")
    sys.exit(2)


def _first_rows(text: TextSettings, data: DataConfig, *, show: int, validated: DataConfig | None) -> list[DataCheck]:
    from meshrl.models.load import ModelError  # takes seconds to import, and other runs load it in a rank
    from meshrl.sft.data.check import check_data
    from meshrl.sft.data.conversations import DataError

    try:
        return check_data(text, data, show=show, validated=validated)
    except (DataError, ModelError, OSError) as error:
        raise ConfigError(str(error)) from error


if __name__ == "__main__":
    main()
