"""ParallelPlan: how the ranks of a training group divide the work. Arithmetic only; `RankGroup` has the process groups.

Ranks are numbered along the mesh, the last dimension fastest:

    dp_replicate   copies of the model (HSDP); gradients are summed over them
    dp_shard       groups of ranks that train rows of their own and hold different parts of a copy
    cp             context parallel: ranks that share the tokens of a row; FSDP shards parameters over dp_shard * cp
    tp             tensor parallel: ranks that share each matrix product, and have the same rows
    ep             expert parallel: ranks that divide a layer's experts among them and send each other their tokens

Expert parallelism adds no ranks: experts see those of one copy as (efsdp, ep), the last fastest, and FSDP shards a
rank's experts over efsdp. Experts are never divided by tp, so ep is a multiple of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshrl.wire.types import MicroBatch

SHARD, REPLICATE, TENSOR, EXPERTS_SHARD, EXPERTS = "fsdp", "dp_replicate", "tp", "efsdp", "ep"

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """One rank's view of the group; without arguments, a process on its own."""

    rank: int = 0
    local_rank: int = 0  # among the ranks of this machine, and so the index of its GPU
    local_world_size: int = 1  # ranks on this machine
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.shards % self.ep:
            raise ValueError(
                f"model.ep must divide the ranks that hold a copy of the model ({self.shards}), got {self.ep}; use 1 or"
                " a divisor, or change deployment.num_train_gpus"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not one of {self.world_size} ranks")

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], *, dp_replicate: int = 1, cp: int = 1, tp: int = 1, ep: int = 1
    ) -> ParallelPlan:
        """The plan by torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Raises ValueError when the sizes do
        not divide the ranks."""
        world_size = int(environment.get("WORLD_SIZE", "1"))
        taken, takers = 1, ""
        for key, size in (("dp_replicate", dp_replicate), ("cp", cp), ("tp", tp)):
            if world_size // taken % size:
                beside = f", divided by {taken} already for {takers}" if taken > 1 else ""
                raise ValueError(
                    f"model.{key} must divide the number of ranks ({world_size}{beside}), got {size}; use 1 or a "
                    "divisor, or change deployment.num_train_gpus"
                )
            if size > 1:
                taken, takers = taken * size, f"{takers} and model.{key}" if takers else f"model.{key}"
        return cls(
            rank=int(environment.get("RANK", "0")),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
            dp_replicate=dp_replicate,
            dp_shard=world_size // taken,
            cp=cp,
            tp=tp,
            ep=ep,
        )

    # --- the group --------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    @property
    def leads(self) -> bool:
        """Rank 0 serves, and writes shared files."""
        return self.rank == 0

    @property
    def reports(self) -> bool:
        """Of ranks that share rows, one does."""
        return self.rank % (self.cp * self.tp) == 0

    @property
    def on_one_host(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The dimensions of all ranks' mesh, outermost first: FSDP shards over those before tp."""
        return self._copies | {SHARD: self.dp_shard * self.cp} | ({TENSOR: self.tp} if self.tp > 1 else {})

    @property
    def experts_shape(self) -> dict[str, int]:
        """The dimensions of the mesh over which experts are divided, and then sharded."""
        return self._copies | {EXPERTS_SHARD: self.shards // self.ep, EXPERTS: self.ep}

    @property
    def _copies(self) -> dict[str, int]:
        return {REPLICATE: self.dp_replicate} if self.dp_replicate > 1 else {}

    @property
    def layout(self) -> str:
        """For a person: the dimensions of more than one rank, or "one rank"."""
        sizes = ((name, getattr(self, name)) for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep"))
        return ", ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"

    # --- rows: who trains what ----------------------------------------------------------------------

    @property
    def dp_size(self) -> int:
        """Groups of cp * tp ranks, which train different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.cp * self.tp)

    def own_rows(self, micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        return [micro_batch for micro_batch in micro_batches if micro_batch.dp_rank == self.dp_rank]

    # --- weights: who holds and sends what ------------------------------------------------------------

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the model between them."""
        return self.dp_shard * self.cp * self.tp

    @property
    def num_senders(self) -> int:
        """Ranks that send a version's bytes, each the rows that it holds: the first copy's."""
        return self.shards

    @property
    def row_order(self) -> tuple[int, ...]:
        """The part of an experts' tensor that each sender has: ep divides its rows first, FSDP those of a rank."""
        sharded = self.shards // self.ep
        return tuple(rank % self.ep * sharded + rank // self.ep for rank in range(self.num_senders))

    # --- files: who reads what ------------------------------------------------------------------------

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """This rank's share of work that any rank can do."""
        return items[self.rank :: self.world_size]
