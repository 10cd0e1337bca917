"""Downloads that wait: for a rate limit, longer than others wait for what stands still, and for slow hashing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from meshrl.client import WeightSyncClient
from meshrl.inference.agent.version_loader import VersionFetcher
from meshrl.versions import downloads, sources
from meshrl.versions.downloads import Downloader
from meshrl.versions.files import Spool
from meshrl.versions.sources import LinkLimits
from meshrl.versions.version_bytes import VersionBytes
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Manifest, Transport
from weight_mesh import Mesh, make_state

STATE = make_state(1)
MBPS = 0.1  # 45 kB at this rate take 3.6 s; a claim that stands still is taken over after 2 s


class Streamed:
    """Version 0 at a hub, `STATE`, and downloaders of it, which are closed after the test."""

    def __init__(self, client: WeightSyncClient, manifest: Manifest, artifact_id: str) -> None:
        self.client, self.manifest, self.artifact_id = client, manifest, artifact_id
        self.opened: list[Downloader] = []

    def downloader(self, **limits: Any) -> Downloader:
        self.opened.append(Downloader(self.client, LinkLimits(**limits)))
        return self.opened[-1]

    def room(self, kind: type[VersionBytes] = VersionBytes) -> Any:
        return kind(self.manifest, memory=np.zeros(self.manifest.payload_bytes, dtype=np.uint8))

    async def pull(self, downloader: Downloader, held: VersionBytes) -> None:
        await asyncio.wait_for(downloader.pull(held, self.artifact_id), 60.0)
        assert not held.missing

    async def fetch(self, fetcher: VersionFetcher) -> Any:
        held = await asyncio.wait_for(fetcher.fetch(self.manifest, self.artifact_id), 120.0)
        assert all(torch.equal(held.tensors(self.manifest)[name], tensor) for name, tensor in STATE.items())
        return held


@pytest.fixture
async def streamed(mesh: Mesh) -> AsyncIterator[Streamed]:
    await mesh.publisher(Transport.STREAM).publish(0, STATE)
    client = mesh.client()
    made = Streamed(client, *await client.get_manifest(version=0))
    yield made
    for downloader in made.opened:
        await downloader.close()


async def test_claims_that_wait_for_the_rate_limit_and_are_taken_over_break_no_download(streamed: Streamed) -> None:
    held = await streamed.fetch(VersionFetcher(streamed.downloader(connections=4, mbps=MBPS)))
    held.release()


class HashedOnceTheLoopHasTurned(VersionBytes):
    loop: asyncio.AbstractEventLoop

    def _check(self, *chunk_and_data: Any) -> None:
        turned = threading.Event()
        self.loop.call_soon_threadsafe(turned.set)
        assert turned.wait(60.0), "the event loop stands still while a chunk is hashed"
        super()._check(*chunk_and_data)


async def test_the_event_loop_goes_on_while_chunks_are_hashed(streamed: Streamed) -> None:
    held = streamed.room(HashedOnceTheLoopHasTurned)
    held.loop = asyncio.get_running_loop()
    await streamed.pull(streamed.downloader(), held)


async def test_a_version_that_was_streamed_is_a_file_that_the_engine_s_processes_read(
    streamed: Streamed, tmp_path: Path
) -> None:
    held = await streamed.fetch(VersionFetcher(streamed.downloader(), spool=Spool(tmp_path)))
    found = load_file(held.files[0])
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())
    held.release()
    with pytest.raises(FileNotFoundError):
        load_file(held.files[0])


async def test_from_near_whole_chunks_are_asked_for_at_any_rate(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, asked = WeightSyncClient.fetch, []

    def noted(client: WeightSyncClient, artifact_id: str, ranges: Any, chunk_bytes: int, **more: Any) -> Any:
        asked.append((*ranges[0], chunk_bytes))
        return fetch(client, artifact_id, ranges, chunk_bytes, **more)

    monkeypatch.setattr(WeightSyncClient, "fetch", noted)
    monkeypatch.setattr(downloads, "FIRST_CLAIM", 6000)
    monkeypatch.setattr(downloads, "NEAR_CLAIM", 3 * 4096)
    downloader = streamed.downloader(connections=2)
    downloader.sources.choose(0.0).answered(sources.FAR_S / 2)
    await streamed.pull(downloader, streamed.room())
    ends = {chunk.offset + chunk.length for chunk in streamed.manifest.chunks}
    assert len(asked) > 1
    assert all(offset + length in ends and not chunk_bytes for offset, length, chunk_bytes in asked), asked


async def test_connections_that_much_came_over_from_far_away_are_new_before_the_next_version(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FAR_S", -1.0)
    monkeypatch.setattr(downloads, "RENEWED_FROM", 1)
    downloader = streamed.downloader(connections=3)
    connections, hub = downloader.connections, downloader.sources.choose(0.0)
    before = [streamed.client]
    for _ in range(2):
        await streamed.pull(downloader, streamed.room())
        assert downloader._renewing is not None
        await asyncio.wait_for(downloader._renewing, 60.0)
        assert connections.get(hub, 0) not in before
        before.append(connections.get(hub, 0))
    await downloader.close()
    assert await streamed.client.epoch() == 1  # the first connection is others' as well


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_delta_is_used_while_the_rest_of_it_comes_and_let_go_where_it_does_not(
    streamed: Streamed, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, manifest, check = threading.Event(), streamed.manifest, VersionBytes._check

    def checked_once_used(held: VersionBytes, chunk: Any, data: Any) -> None:
        if chunk.offset:
            assert used.wait(60.0), "the first chunk was not used before the others came"
            if breaks:
                raise MeshError(Reason.UNKNOWN_VERSION, "the bytes are gone")
        check(held, chunk, data)

    def use(payload: Any, wait_for: Callable[[int], None]) -> None:
        wait_for(manifest.chunks[0].length)
        used.set()
        wait_for(len(payload))
        assert payload.any()

    monkeypatch.setattr(VersionBytes, "_check", checked_once_used)
    fetching = asyncio.wait_for(VersionFetcher(streamed.downloader()).fetch_delta(manifest, use), 60.0)
    if breaks:
        with pytest.raises(MeshError, match="the bytes are gone"):
            await fetching
    else:
        assert len(await fetching) == manifest.payload_bytes


async def test_a_call_whose_connection_is_closed_for_another_call_s_failure_is_made_again(
    streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, downloader = WeightSyncClient.fetch, streamed.downloader()
    connections, source = downloader.connections, downloader.sources.choose(0.0)
    dropped = connections._clients[source.address, 0] = connections._open(source)

    async def cut(over: WeightSyncClient, *asked: Any, **more: Any) -> Any:
        async for piece in fetch(over, *asked, **more):
            yield piece
            if over is dropped and connections._clients.pop((source.address, 0), None) is not None:
                await over.close()

    monkeypatch.setattr(WeightSyncClient, "fetch", cut)
    await streamed.pull(downloader, streamed.room())
    assert connections._clients[source.address, 0] is not dropped
