"""How weights leave a rank: what its training thread does between two steps, so that a version can be published beside.

Rank 0 decides at the start (`PublicationSettings`) and tells the others; from then on every rank takes each version at
the same place in the order of collectives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from meshrl.models.lora import adapter_state, peft_state
from meshrl.models.state import gather_state, own_rows
from meshrl.trainer.publishing.broadcast_sender import GroupWorker
from meshrl.trainer.publishing.collective_publisher import TakenRows
from meshrl.trainer.publishing.file_publisher import FileWorker
from meshrl.trainer.publishing.rank_calls import CrewMember, Worker
from meshrl.trainer.publishing.rows import RowBytes, Rows, copy_rows, num_senders
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.versions.collective.communicator import reach_store
from meshrl.versions.collective.sending import take_snapshot
from meshrl.wire.types import Transport

STORE_DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class PublicationSettings:
    """How versions leave this trainer, the same on every rank.

    in_shares: each sender rank brings its rows, else rank 0 gathers them; store_address: where the ranks meet, and
    engines with transport nccl, empty where they need not.
    """

    transport: str
    epoch: int
    adapter_only: bool
    in_shares: bool
    folder: str
    chunk_bytes: int
    bucket_bytes: int
    num_threads: int
    backend: str
    deadline_s: float
    store_address: str = ""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> PublicationSettings:
        return cls(**json.loads(data))


class Exit(Protocol):
    """One rank's way out for versions; for the training thread."""

    def take(self, version: int) -> Any:
        """Lays the weights aside as they are now; collective. Rank 0 gives what it returns to the publisher."""


class GatherExit:
    """Collects the whole weights, or the whole adapter, on rank 0."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, parallel: RankGroup, *, adapter_only: bool) -> None:
        self._model, self._dtype, self._adapter_only = model, dtype, adapter_only
        self._keep = parallel.rank == 0

    def take(self, version: int) -> Mapping[str, torch.Tensor]:
        if self._adapter_only:
            return peft_state(adapter_state(self._model, keep=self._keep))
        return gather_state(self._model, self._dtype, keep=self._keep)


class FileExit:
    """Copies this rank's rows aside for the file of the version; gives the seconds that took."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, parallel: RankGroup, settings: PublicationSettings
    ) -> None:
        self._model, self._dtype, self._rank = model, dtype, parallel.rank
        senders = num_senders(parallel)
        self.rows = Rows.of(model, dtype, num_senders=senders, bucket_bytes=settings.bucket_bytes)
        self.worker = FileWorker(
            self.rows,
            Path(settings.folder),
            sender=parallel.rank,
            epoch=settings.epoch,
            chunk_bytes=settings.chunk_bytes,
            num_threads=settings.num_threads,
            deadline_s=settings.deadline_s,
        )

    def take(self, version: int) -> float:
        began_s = time.perf_counter()
        last: RowBytes | None = self.worker.held.drop()  # the version before is published
        self.worker.held.put(version, copy_rows(self._model, self._dtype, self.rows, self._rank, last))
        return time.perf_counter() - began_s


class GroupExit:
    """Copies this rank's rows aside in the order in which they are broadcast, and adds up the digests of all ranks."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, parallel: RankGroup, settings: PublicationSettings
    ) -> None:
        self._model, self._dtype, self._parallel = model, dtype, parallel
        self._senders = num_senders(parallel)
        self.rows = Rows.of(model, dtype, num_senders=self._senders, bucket_bytes=settings.bucket_bytes)
        self._tensors = self.rows.tensors()
        self.worker = GroupWorker(
            sender=parallel.rank,
            device=parallel.device,
            store_address=settings.store_address,
            backend=settings.backend,
            deadline_s=settings.deadline_s,
        )

    def take(self, version: int) -> TakenRows:
        began_s = time.perf_counter()
        reuse = self.worker.make_way()
        own = own_rows(self._model, self._dtype)
        lanes = torch.zeros((len(self._tensors), 2), dtype=torch.int64)
        if self._parallel.rank < self._senders:
            snapshot = take_snapshot(
                self._tensors, self.rows.collective, own, self._parallel.rank, self._parallel.device, reuse=reuse
            )
            lanes = snapshot.digests.cpu()  # which waits for the device: later steps may change the weights
            self.worker.held.put(version, snapshot)
        taken_s = time.perf_counter()
        digests = self._parallel.sum(lanes.numpy())
        return TakenRows(digests=digests, snapshot_s=taken_s - began_s, digest_s=time.perf_counter() - taken_s)


def open_exit(
    settings: PublicationSettings, model: nn.Module, dtype: torch.dtype, parallel: RankGroup
) -> GatherExit | FileExit | GroupExit:
    """This rank's exit; on the sender ranks but the first it comes with the thread that does its share."""
    if not settings.in_shares:
        return GatherExit(model, dtype, parallel, adapter_only=settings.adapter_only)
    kind = GroupExit if settings.transport == Transport.NCCL.value else FileExit
    exit_ = kind(model, dtype, parallel, settings)
    if 0 < parallel.rank < num_senders(parallel):
        worker: Worker = exit_.worker
        store = reach_store(settings.store_address, deadline_s=STORE_DEADLINE_S)
        CrewMember(worker, store, rank=parallel.rank)
    return exit_
