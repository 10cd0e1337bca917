"""A publisher of whatever weights a test names, over files or the stream, as rank 0 of a trainer of one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshrl.client import WeightSyncClient
from meshrl.trainer.publishing.publisher import Publisher, PublishReport
from meshrl.versions.snapshot import Captured
from meshrl.versions.transports.base import Prepared, VersionLine
from meshrl.versions.transports.filesystem import FileShare, FilesystemTransport
from meshrl.versions.transports.rank_calls import RankCalls
from meshrl.versions.transports.stream import StreamShare, StreamTransport
from meshrl.versions.uploads import RETRY_FOR_S
from meshrl.wire.manifest import Adapter
from meshrl.wire.types import Transport, VersionProbe


class StatePublisher:
    """Publishes states by name, all of one run in one epoch; files go to `folder`."""

    def __init__(
        self,
        client: WeightSyncClient,
        transport: Transport,
        folder: Path,
        *,
        run_id: str = "run",
        epoch: int = 1,
        adapter: Adapter | None = None,
        retry_for_s: float = RETRY_FOR_S,
        num_threads: int = 1,
        chunk_bytes: int = 4096,
        anchor_every: int | None = None,
    ) -> None:
        line = VersionLine(run_id=run_id, epoch=epoch, adapter=adapter)
        way: StreamTransport | FilesystemTransport
        rows: dict[str, Any] = {"chunk_bytes": chunk_bytes, "num_threads": num_threads, "anchor_every": anchor_every}
        if transport is Transport.STREAM:
            streamed = StreamShare(folder, epoch=epoch, num_threads=num_threads)
            way = StreamTransport(line, RankCalls(streamed, None, num_ranks=1), streamed, **rows)
        else:
            share = FileShare(folder, epoch=epoch, num_threads=num_threads)
            way = FilesystemTransport(line, RankCalls(share, None, num_ranks=1), share, **rows)
        self.client, self._transport = client, way
        self.progress = way.progress
        self.publisher = Publisher(client, way, retry_for_s=retry_for_s)

    async def prepare(self, version: int, state: Mapping[str, torch.Tensor]) -> Prepared:
        """The manifest and bytes of a version, of which the hub has not heard."""
        return await self._transport.prepare(version, Captured(gathered=state))

    async def publish(
        self,
        version: int,
        state: Mapping[str, torch.Tensor],
        traceparent: str = "",
        *,
        probe: VersionProbe | None = None,
    ) -> PublishReport:
        captured = Captured(gathered=state, probe=None if probe is None else lambda: probe)
        return await self.publisher.publish(version, captured, traceparent)

    async def close(self) -> None:
        await self.publisher.close()
