"""`trainer --bench`: the learner that this configuration builds, measured on fake data instead of trained."""

from __future__ import annotations

import os
import sys

import torch
from loguru import logger

from meshrl.core.config import ConfigError
from meshrl.models.load import ModelError
from meshrl.trainer.config import TrainerConfig
from meshrl.trainer.objectives import build_objective
from meshrl.training.bench.config import BenchConfig
from meshrl.training.bench.run import bench_rank


def run_bench(config: TrainerConfig, bench: BenchConfig) -> None:
    """Measures as one rank of the group. Exits with 2 where a changed configuration would help."""
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    try:
        bench_rank(
            bench,
            config.model,
            objective=build_objective(config.loss),
            optim=config.optim,
            seq_len=config.seq_len,
            output_dir=config.output_dir,
            seed=config.seed,
            max_logits_bytes=config.max_logits_mib and config.max_logits_mib * 2**20,
            environment=os.environ,
        )
    except (ModelError, ConfigError, ValueError) as error:  # what a changed configuration mends
        logger.error("{}", error)
        sys.exit(2)
