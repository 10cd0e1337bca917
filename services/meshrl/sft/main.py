"""The `sft` program: this process becomes one rank of a training group, or the agent that starts its ranks."""

from __future__ import annotations

import os
import sys

from meshrl.core.config import load_config
from meshrl.core.orphans import end_with_agent
from meshrl.core.paths import Layout
from meshrl.core.telemetry.logs import setup_logging
from meshrl.sft.config import SFTConfig
from meshrl.training.parallel.deployment import is_rank, own_rank


def main() -> None:
    """Console script `sft`."""
    end_with_agent(os.environ)
    config = load_config(SFTConfig, prog="sft")
    layout = Layout(config.output_dir)
    if config.deployment.num_train_gpus > 1 and not is_rank(os.environ):
        from meshrl.training.parallel.torchrun import run_ranks

        setup_logging("sft", config.log.level, json_logging=config.log.json_logging)
        sys.exit(run_ranks("meshrl.sft.main", "sft", config.deployment, layout, os.environ))
    # An agent has no use for all of this, which takes seconds.
    from meshrl.sft.bench import run_bench
    from meshrl.sft.program import run_rank

    rank = own_rank(os.environ)
    setup_logging(
        f"sft:{rank}" if rank else "sft",
        config.log.level,
        None if rank else layout.log("sft"),
        json_logging=config.log.json_logging,
    )
    if config.bench is not None:
        run_bench(config, config.bench)
    else:
        run_rank(config, layout, rank)


if __name__ == "__main__":
    main()
