"""The `bench` section of a trainer: measure steps on made-up data instead of training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from meshrl.core.config import BaseConfig


class BenchConfig(BaseConfig):
    """Measures the trainer on fake data and prints a table; nothing is served or trained for good."""

    steps: int = Field(default=5, ge=1)
    """Steps that are measured."""

    warmup_steps: int = Field(default=2, ge=0)
    """Steps before them, in which memory is claimed and kernels are compiled."""

    rows: int | None = Field(default=None, ge=1)
    """Samples of seq_len tokens that a rank trains a step. None: data.batch_size of sft, else 1."""

    micro_batch_size: int = Field(default=1, ge=1)
    """Samples of seq_len tokens that go through the model at once; sft takes data.micro_batch_size."""

    lengths: Literal["fixed", "variable"] = "fixed"
    """fixed: one sample fills a row; variable: samples of lognormal length, packed."""

    median_length: int | None = Field(default=None, ge=2)
    """variable: median length of a sample in tokens; None means an eighth of seq_len."""

    random_weights: bool = False
    """Start from random weights, for a folder with only a config.json."""

    num_layers: int | None = Field(default=None, ge=1)
    """Take so many layers of the model, with random weights; None takes all."""

    balanced_routing: bool = False
    """Send equally many tokens to each expert, in place of the routers' choices; the table names it."""

    profile: bool = False
    """Trace one more step and add where the device's time goes."""

    json_path: Path | None = None
    """File for the same numbers as JSON; None means bench/trainer.json in output_dir."""
