"""Trainer ranks that shard plain models by FSDP2 and publish them by the nccl transport, over gloo; a program.

    python publishing_ranks.py EPOCH FIRST_VERSION HUB BUCKET_BYTES DTYPE [DIE_AT]

Run by `forked_ranks`. Rank 0 reads lines from its standard input, each the seed of the plain model that is the
next version, and answers each with a line of JSON once the version was sent: its number, its bytes, what this rank has
sent, and how large what it keeps is; or the error. At version DIE_AT rank 1 is killed once it has sent two buckets.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from meshrl.client import WeightSyncClient
from meshrl.trainer.publishing.publisher import Publisher
from meshrl.trainer.publishing.snapshots import PublicationSettings, open_snapshotter
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.versions.collective.communicator import Communicator, Operation, open_store, reach_store
from meshrl.versions.transports.base import VersionLine
from meshrl.versions.transports.broadcast import BroadcastTransport
from meshrl.versions.transports.rank_calls import RankCalls
from meshrl.wire.errors import MeshError
from plain_model import _empty_model, plain_model

BUCKETS_BEFORE_DEATH = 2


class Ranks:
    """This rank's model and its snapshotter."""

    def __init__(self, epoch: int, first_version: int, bucket_bytes: int, dtype: torch.dtype) -> None:
        self.parallel = RankGroup.start(os.environ, device=torch.device("cpu"))
        self.model = _empty_model("qwen3")
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.parallel.mesh)
        fully_shard(self.model, mesh=self.parallel.mesh)
        self.store = open_store("127.0.0.1", deadline_s=30.0) if self.parallel.rank == 0 else None
        port = self.parallel.broadcast(None if self.store is None else str(self.store.port).encode()).decode()
        settings = PublicationSettings(
            transport="nccl", epoch=epoch, adapter_only=False, in_shares=True, folder="", chunk_bytes=4096,
            bucket_bytes=bucket_bytes, num_threads=1, backend="gloo", deadline_s=60.0,
            store_address=f"127.0.0.1:{port}",
        )  # fmt: skip
        learner: Any = SimpleNamespace(model=self.model, parallel=self.parallel)
        run: Any = SimpleNamespace(run_id="run")
        self.snapshotter = open_snapshotter(settings, learner, run, dtype)
        self.version = first_version - 1

    @torch.no_grad()
    def capture(self, seed: bytes | None) -> Any:
        """The plain model of a seed as the next version; every rank calls it. None at the end."""
        seed = self.parallel.broadcast(seed)
        if not seed:
            return None
        whole = dict(plain_model(int(seed)).named_parameters())
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor)
            own = distribute_tensor(whole[name].detach(), parameter.device_mesh, parameter.placements)
            parameter.to_local().copy_(own.to_local())
        self.version += 1
        return self.snapshotter.capture(self.version)


def die_at(version: int, ranks: Ranks) -> None:
    """Has this rank killed in the midst of sending a version."""
    scatter, seen = Communicator.scatter, list[int]()

    def count(self: Communicator, flat: torch.Tensor, sizes: Sequence[int]) -> Operation:
        if ranks.version == version:
            seen.append(1)
            if len(seen) > BUCKETS_BEFORE_DEATH:
                os.kill(os.getpid(), signal.SIGKILL)
        return scatter(self, flat, sizes)

    Communicator.scatter = count  # type: ignore[method-assign]


async def lead(ranks: Ranks, epoch: int, hub: str) -> None:
    share, plan = ranks.snapshotter.share, ranks.snapshotter.plan
    address, thread, seeds = share.store_address, ThreadPoolExecutor(1), os.fdopen(0)
    calls = RankCalls(share, reach_store(address, deadline_s=30.0), num_ranks=ranks.parallel.world_size)
    loop = asyncio.get_running_loop()
    async with WeightSyncClient(hub) as client:
        line = VersionLine(run_id="run", epoch=epoch)
        publisher = Publisher(client, BroadcastTransport(line, calls, share, plan, client, ranks.store))
        while seed := (await loop.run_in_executor(thread, seeds.readline)).strip():
            captured = await loop.run_in_executor(thread, ranks.capture, seed.encode())
            try:
                report = await asyncio.wait_for(publisher.publish(ranks.version, captured), 120.0)
            except (MeshError, TimeoutError) as error:
                print(json.dumps({"error": repr(error)}), flush=True)
                continue
            rows = share.held.get(ranks.version, deadline_s=1.0).flat.numel()
            print(
                json.dumps(
                    {
                        "version": ranks.version, "bytes": plan.num_bytes, "rows": rows, "scatters": share.scatters,
                        "root": report.root.hex(), **{f"{part}_s": value for part, value in report.parts_s.items()},
                    }
                ),
                flush=True,
            )  # fmt: skip
        await loop.run_in_executor(thread, ranks.capture, b"")


def main() -> None:
    epoch, first_version, hub, bucket_bytes, dtype, *death = sys.argv[1:]
    ranks = Ranks(int(epoch), int(first_version), int(bucket_bytes), getattr(torch, dtype))
    if ranks.parallel.rank:
        if death and ranks.parallel.rank == 1:
            die_at(int(death[0]), ranks)
        while ranks.capture(None) is not None:
            pass
    else:
        asyncio.run(lead(ranks, int(epoch), hub))
    os._exit(0)


if __name__ == "__main__":
    main()
