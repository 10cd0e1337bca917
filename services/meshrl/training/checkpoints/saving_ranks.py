"""The ranks of a training group while they save or load a checkpoint: a failure on one is a failure on all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from meshrl.training.checkpoints.files import CheckpointError
from meshrl.training.parallel.rank_group import RankGroup

Result = TypeVar("Result")

_NEEDED = (
    "output_dir must be on a disk with room that all ranks share, where this user may write; free some, and resume with"
    " --ckpt.resume-step -1"
)


class SavingRanks(RankGroup):
    """A RankGroup's ranks with a control group of their own, so that a save in the background never mixes with a step's
    collectives. For one thread."""

    @classmethod
    def beside(cls, parallel: RankGroup, *, timeout_s: float) -> SavingRanks:
        """Collective. `timeout_s` bounds the wait for a slow rank."""
        control = None
        if parallel.control is not None:
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(parallel.plan, control=control)

    def together(self, what: str, action: Callable[[], Result]) -> Result:
        """Runs `action` on every rank. Raises CheckpointError on all when one fails."""
        try:
            result = action()
        except (OSError, SafetensorError, CheckpointError, CheckpointException) as error:
            self.any(True)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"rank {self.rank} could not {what} ({reason(error)}); {_NEEDED}") from error
        if self.any(False):
            raise CheckpointError(f"another rank could not {what}, its log says why; {_NEEDED}")
        return result


def reason(error: BaseException) -> str:
    """One line; torch's own shows all ranks' tracebacks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))
    return str(error)
