"""The sender ranks of a trainer of two, in this process, which broadcast or scatter versions over gloo."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshrl.client import WeightSyncClient
from meshrl.trainer.publishing.publisher import Publisher, PublishReport
from meshrl.versions.collective.communicator import open_store, reach_store
from meshrl.versions.collective.plan import PublishPlan, rows_of
from meshrl.versions.layout import layout_of
from meshrl.versions.snapshot import Captured, take_snapshot
from meshrl.versions.transports.base import VersionLine
from meshrl.versions.transports.broadcast import CPU, BroadcastShare, BroadcastTransport
from meshrl.versions.transports.rank_calls import RankCalls, RankCallThread
from meshrl.wire.manifest import plan_tensors
from meshrl.wire.types import CollectivePlan


class EndingStore:
    """A rank's store whose waits end with `close`: a daemon thread that waits in C++ when the interpreter ends aborts
    the process."""

    def __init__(self, store: Any) -> None:
        self._store, self._closed = store, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, keys: Sequence[str], timeout: object) -> None:
        while not self._store.check(keys):
            if self._closed.wait(0.005):
                raise RuntimeError("closed")

    def close(self) -> None:
        self._closed.set()


class TwoRanks:
    """The shares of two ranks, the second with its own thread, and rank 0's transport and publisher."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], client: WeightSyncClient, *, run_id: str, bucket_bytes: int,
        deadline_s: float, **more: Any,
    ) -> None:  # fmt: skip
        self.store = open_store("127.0.0.1", deadline_s=30.0)
        address = f"127.0.0.1:{self.store.port}"
        self.plan = PublishPlan(
            tensors=plan_tensors(layout_of(weights)),
            collective=CollectivePlan(num_senders=2, bucket_bytes=bucket_bytes),
        )
        self.shares = [
            BroadcastShare(
                sender=sender, device=CPU, store_address=address, backend="gloo", deadline_s=deadline_s, plan=self.plan
            )
            for sender in range(2)
        ]
        self._second = EndingStore(reach_store(address, deadline_s=30.0))
        RankCallThread(self.shares[1], self._second, rank=1)  # type: ignore[arg-type]  # all of a store that it calls
        line, calls = VersionLine(run_id=run_id, epoch=1), RankCalls(self.shares[0], self.store, num_ranks=2)
        self.transport = BroadcastTransport(
            line, calls, self.shares[0], self.plan, client, self.store, watch_s=0.1, **more
        )
        self.publisher = Publisher(client, self.transport)

    async def publish(self, version: int, weights: Mapping[str, torch.Tensor]) -> PublishReport:
        for sender, share in enumerate(self.shares):
            share.release_snapshot()
            rows = {name: tensor[slice(*rows_of(len(tensor), sender, 2))] for name, tensor in weights.items()}
            share.held.put(version, take_snapshot(self.plan, rows, sender, CPU))
        return await self.publisher.publish(version, Captured())

    async def close(self) -> None:
        await self.publisher.close()
        self._second.close()
