"""The `trainer` program: this process becomes one rank of a training group, or the agent that starts its ranks."""

from __future__ import annotations

import os
import sys

from meshrl.core.config import load_config
from meshrl.core.orphans import end_with_agent
from meshrl.core.paths import Layout
from meshrl.core.telemetry.logs import setup_logging
from meshrl.trainer.config import TrainerConfig
from meshrl.training.parallel.deployment import is_rank, own_rank


def main() -> None:
    """Console script `trainer`."""
    end_with_agent(os.environ)
    config = load_config(TrainerConfig, prog="trainer")
    layout = Layout(config.output_dir)
    if config.deployment.num_train_gpus > 1 and not is_rank(os.environ):
        from meshrl.training.parallel.torchrun import run_ranks

        setup_logging("trainer", config.log.level, json_logging=config.log.json_logging)
        sys.exit(run_ranks("meshrl.trainer.main", "trainer", config.deployment, layout, os.environ))
    rank = own_rank(os.environ)
    setup_logging(
        f"trainer:{rank}" if rank else "trainer",
        config.log.level,
        None if rank else layout.log("trainer"),
        json_logging=config.log.json_logging,
    )
    if config.bench is not None:
        from meshrl.trainer.bench import run_bench

        run_bench(config, config.bench)
    else:
        from meshrl.trainer.program import run_rank  # each way takes seconds to import, and an agent needs none

        run_rank(config, layout, rank)


if __name__ == "__main__":
    main()
