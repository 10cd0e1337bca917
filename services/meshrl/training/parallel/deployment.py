"""The `deployment` section: how many processes a trainer is."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from meshrl.core.config import BaseConfig


class DeploymentConfig(BaseConfig):
    """How a trainer is spread over processes on this machine."""

    num_train_gpus: int = Field(default=1, ge=1)
    """Processes that train together, one for each GPU; without GPUs they share the cores. The program starts more than
    one through torchrun. Has no effect on a rank that torchrun started."""


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether torchrun's variables make this process a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def own_rank(environment: Mapping[str, str]) -> int:
    """0 for a process alone."""
    return int(environment.get("RANK", "0"))
