"""How many processes a trainer is: the `deployment` section, and whether this process is one of them."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from meshrl.core.config import BaseConfig


class DeploymentConfig(BaseConfig):
    """How a trainer is spread over processes on this machine."""

    num_train_gpus: int = Field(default=1, ge=1)
    """Processes that train together, one for each GPU; on a machine without GPUs they share its cores.

    More than one are started through torchrun by the program itself. Has no effect on a rank that torchrun started.
    """


def is_rank(environment: Mapping[str, str]) -> bool:
    """True when torchrun, or whatever sets its variables, has started this process as one rank of a group."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def own_rank(environment: Mapping[str, str]) -> int:
    """This process's place in its group; 0 for a process alone."""
    return int(environment.get("RANK", "0"))
