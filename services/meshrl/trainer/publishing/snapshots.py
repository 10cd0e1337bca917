"""Each rank's snapshotter: copies its weights between two steps, on the training thread.

Every rank captures a version at the same place in the order of collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from meshrl.models.lora import adapter_state, peft_state
from meshrl.models.state import gather_state, own_rows, published_tensors
from meshrl.trainer.publishing.probes import PendingProbe, prober
from meshrl.training.learner import Learner
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.training.run_state import RunState
from meshrl.versions.collective.communicator import reach_store
from meshrl.versions.collective.plan import PublishPlan
from meshrl.versions.layout import dtype_name
from meshrl.versions.snapshot import Captured, take_snapshot
from meshrl.versions.transports.broadcast import BroadcastShare
from meshrl.versions.transports.filesystem import FileShare
from meshrl.versions.transports.rank_calls import RankCallThread
from meshrl.versions.transports.stream import StreamShare
from meshrl.wire.manifest import plan_tensors
from meshrl.wire.types import CollectivePlan, Transport

STORE_DEADLINE_S = 60.0


def plan_of(
    model: nn.Module,
    dtype: torch.dtype | None,
    *,
    num_senders: int = 1,
    bucket_bytes: int = 1,
    row_order: Sequence[int] = (),
) -> PublishPlan:
    """The plan for a model whose floating-point weights are published as `dtype` (None: each as it is).

    `row_order`: which part of its rows each sender has of a tensor that is divided twice.
    """
    published = published_tensors(model, dtype, num_senders=num_senders)
    tensors = plan_tensors((tensor.name, dtype_name(tensor.dtype), tensor.shape) for tensor in published)
    found = {tensor.name: tensor for tensor in published}
    whole = [i for i, entry in enumerate(tensors) if num_senders > 1 and not found[entry.name].in_rows]
    reordered = [i for i, entry in enumerate(tensors) if i not in whole and found[entry.name].reordered]
    return PublishPlan(
        tensors=tensors,
        collective=CollectivePlan(
            num_senders=num_senders,
            bucket_bytes=bucket_bytes,
            whole_tensors=tuple(whole),
            reordered_tensors=tuple(reordered),
            row_order=tuple(row_order) if reordered else (),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class PublicationSettings:
    """How versions leave this trainer, as rank 0 decides for all.

    in_shares: each sender rank publishes its rows, else rank 0 gathers them; store_address: where the ranks meet, and
    engines with transport nccl.
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
    probe_tokens: int = 0


class Snapshotter:
    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        parallel: RankGroup,
        settings: PublicationSettings,
        probe: Callable[[], PendingProbe] | None = None,
    ) -> None:
        """`probe` begins that of each version, if they have one; collective."""
        self.share: FileShare | BroadcastShare | StreamShare
        self._model, self._dtype, self._parallel, self._probe = model, dtype, parallel, probe
        self._adapter_only, self._in_shares = settings.adapter_only, settings.in_shares
        senders = parallel.plan.num_senders
        self._is_sender = parallel.rank < senders
        self.plan = plan_of(
            model,
            dtype,
            num_senders=senders,
            bucket_bytes=settings.bucket_bytes,
            row_order=parallel.plan.row_order,
        )
        if settings.transport == Transport.NCCL.value:
            self.share = BroadcastShare(
                sender=parallel.rank,
                device=parallel.device,
                store_address=settings.store_address,
                backend=settings.backend,
                deadline_s=settings.deadline_s,
                plan=self.plan,
                num_threads=settings.num_threads,
            )
        else:
            kind = FileShare if settings.transport == Transport.FILESYSTEM.value else StreamShare
            self.share = kind(
                Path(settings.folder),
                epoch=settings.epoch,
                share=parallel.rank if settings.in_shares else 0,
                num_shares=senders if settings.in_shares else 1,
                num_threads=settings.num_threads,
                deadline_s=settings.deadline_s,
            )

    def capture(self, version: int) -> Captured:
        """Copies the current weights; collective. Rank 0 passes the result to the publisher."""
        began_s = time.perf_counter()
        probe = None if self._probe is None else self._probe()
        probe_s = {} if probe is None else {"probe": time.perf_counter() - began_s}
        captured = self._copy(version)
        return replace(captured, probe=probe, parts_s={**probe_s, **captured.parts_s})

    def _copy(self, version: int) -> Captured:
        if not self._in_shares:
            # The whole weights, or the whole adapter, on rank 0; the other ranks keep nothing of them.
            keep = self._parallel.rank == 0
            if self._adapter_only:
                state = peft_state(adapter_state(self._model, keep=keep))
            else:
                state = gather_state(self._model, self._dtype, keep=keep)
            return Captured(gathered=state if keep else None)
        began_s = time.perf_counter()
        reuse = self.share.release_snapshot()
        senders = self._parallel.plan.num_senders
        own = own_rows(self._model, self._dtype, sender=self._parallel.rank % senders, num_senders=senders)
        if self._is_sender:
            broadcast = isinstance(self.share, BroadcastShare)
            device = self._parallel.device if broadcast else next(iter(own.values())).device
            self.share.held.put(version, take_snapshot(self.plan, own, self._parallel.rank, device, reuse=reuse))
        return Captured(parts_s={"snapshot": time.perf_counter() - began_s})


def open_snapshotter(settings: PublicationSettings, learner: Learner, run: RunState, dtype: torch.dtype) -> Snapshotter:
    """This rank's snapshotter of a run; on sender ranks but the first with the thread that does its share."""
    parallel = learner.parallel
    snapshotter = Snapshotter(learner.model, dtype, parallel, settings, prober(learner, run, settings.probe_tokens))
    if settings.in_shares and 0 < parallel.rank < parallel.plan.num_senders:
        store = reach_store(settings.store_address, deadline_s=STORE_DEADLINE_S)
        RankCallThread(snapshotter.share, store, rank=parallel.rank)
    return snapshotter
