"""Which rank of the training group this process is; read once at start, before any collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshrl.wire.types import MicroBatch


@dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """This process in its training group. Data parallelism only: every rank holds the whole model."""

    rank: int = 0
    world_size: int = 1

    @property
    def dp_size(self) -> int:
        return self.world_size

    @property
    def dp_rank(self) -> int:
        return self.rank

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ParallelContext:
        """Reads torchrun's RANK and WORLD_SIZE. Raises ValueError for a group larger than one process.

        Micro-batches carry their rank and the normaliser is the whole batch's, so sharding changes the learner only.
        """
        world_size = int(environment.get("WORLD_SIZE", "1"))
        if world_size > 1:
            raise ValueError(
                f"WORLD_SIZE is {world_size}, but this trainer runs as one process; start it without torchrun"
            )
        return cls(rank=int(environment.get("RANK", "0")), world_size=world_size)

    def own(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of this rank, in order."""
        return [micro_batch for micro_batch in micro_batches if micro_batch.dp_rank == self.dp_rank]
