"""A trainer of one process that broadcasts versions over gloo."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from meshrl.client import WeightSyncClient
from meshrl.models.state import hf_state
from meshrl.trainer.publishing.publisher import Publisher, PublishReport
from meshrl.trainer.publishing.snapshots import PublicationSettings, Snapshotter
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.versions.collective.communicator import open_store
from meshrl.versions.transports.base import VersionLine
from meshrl.versions.transports.broadcast import BroadcastShare, BroadcastTransport
from meshrl.versions.transports.rank_calls import RankCalls
from served_engine import ServedEngine

DEADLINE_S = 30.0
SHORT_S = 2.0  # where an engine takes part that never moves


class Trainer:
    """A model, its snapshotter and the publisher, as rank 0 of a trainer of one process has them."""

    def __init__(
        self, model: str, client: WeightSyncClient, epoch: int, deadline_s: float = DEADLINE_S, **more: Any
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.store = open_store("127.0.0.1", deadline_s=30.0)
        address = f"127.0.0.1:{self.store.port}"
        settings = PublicationSettings(
            transport="nccl", epoch=epoch, adapter_only=False, in_shares=True, folder="", chunk_bytes=4096,
            bucket_bytes=2048, num_threads=1, backend="gloo", deadline_s=deadline_s, store_address=address,
        )  # fmt: skip
        self.snapshotter = Snapshotter(self.model, torch.float32, RankGroup(), settings)
        share = self.snapshotter.share
        assert isinstance(share, BroadcastShare)
        self.share = share
        self.transport = BroadcastTransport(
            VersionLine(run_id="main", epoch=epoch),
            RankCalls(share, None, num_ranks=1),
            share,
            self.snapshotter.plan,
            client,
            self.store,
            watch_s=0.1,
            **more,
        )
        self.publisher = Publisher(client, self.transport)

    async def publish(self, version: int, *, changed: float = 1.0) -> PublishReport:
        """A step that changes every weight, or a share of them, and its version."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.01 * (version + 1) * (torch.rand(parameter.shape, generator=generator) < changed)
        return await self.publisher.publish(version, self.snapshotter.capture(version))

    def is_served_by(self, served: ServedEngine) -> bool:
        ours, live = hf_state(self.model), hf_state(served.model)
        return all(torch.equal(tensor, ours[name]) for name, tensor in live.items())


@asynccontextmanager
async def trainer(model: str, hub: str, epoch: int = 1, **more: Any) -> AsyncIterator[Trainer]:
    async with WeightSyncClient(hub) as client:
        made = Trainer(model, client, epoch, **more)
        yield made
        await made.publisher.close()
