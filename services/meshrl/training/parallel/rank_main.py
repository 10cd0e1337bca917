"""The main of `trainer` and `sft`: one rank of a training group, or the agent of its ranks."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from meshrl.core.heap import loading
from meshrl.core.paths import Layout
from meshrl.core.program import GROUP_LOG, keep_private, log_as, run_log
from meshrl.core.telemetry.logs import setup_logging
from meshrl.core.torch_environment import grow_segments, wait_briefly
from meshrl.training.config import TrainingConfig
from meshrl.training.parallel.deployment import is_rank, own_rank
from meshrl.training.parallel.lifeline import AGENT_PID, end_with_agent

ConfigT = TypeVar("ConfigT", bound=TrainingConfig)


def rank_main(
    name: str,
    load: Callable[[], ConfigT],
    *,
    prepare: Callable[[ConfigT], None] = lambda config: None,
) -> None:
    """Runs `meshrl.<name>.main`, and ends the process with its exit code.

    `prepare` is called once for a group, before anything is written. A rank is `run_rank(config, rank)` of
    `meshrl.<name>.program`, imported only here, since an agent needs none of it.
    """
    end_with_agent(os.environ)
    wait_briefly(os.environ)
    grow_segments(os.environ)
    config = load()
    keep_private(name, config)
    if own_rank(os.environ) == 0 and AGENT_PID not in os.environ:
        prepare(config)
    if config.deployment.num_train_gpus > 1 and not is_rank(os.environ):
        with loading():
            from meshrl.training.parallel.torchrun import run_ranks  # a rank has no use for it

        layout = Layout(config.output_dir)
        log = run_log(name, layout)
        os.environ[GROUP_LOG] = str(log)
        setup_logging(name, config.log.level, log, json_logging=config.log.json_logging)
        sys.exit(run_ranks(f"meshrl.{name}.main", name, config.deployment, layout, os.environ))
    rank = own_rank(os.environ)
    log_as(f"{name}:{rank}" if rank else name, config, to_file=rank == 0)
    with loading():
        program = importlib.import_module(f"meshrl.{name}.program")
    program.run_rank(config, rank)
