"""Downloads that wait: for a rate limit, longer than others wait for what stands still, and for slow hashing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
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
from meshrl.wire.types import Transport
from weight_mesh import Mesh, make_state

MBPS = 0.1  # 45 kB at this rate take 3.6 s; a claim that stands still is taken over after 2 s


async def test_claims_that_wait_for_the_rate_limit_and_are_taken_over_break_no_download(mesh: Mesh) -> None:
    published = make_state(1)
    await mesh.publisher(Transport.STREAM).publish(0, published)
    client = mesh.client()
    downloader = Downloader(client, LinkLimits(connections=4, mbps=MBPS))
    try:
        manifest, artifact_id = await client.get_manifest(version=0)
        held = await asyncio.wait_for(VersionFetcher(downloader).fetch(manifest, artifact_id), 120.0)
        found = held.tensors(manifest)
        assert {name: tensor.tolist() for name, tensor in found.items()} == {
            name: tensor.tolist() for name, tensor in published.items()
        }
        held.release()
    finally:
        await downloader.close()


class HashedOnceTheLoopHasTurned(VersionBytes):
    loop: asyncio.AbstractEventLoop

    def _check(self, *chunk_and_data: Any) -> None:
        turned = threading.Event()
        self.loop.call_soon_threadsafe(turned.set)
        assert turned.wait(10.0), "the event loop stands still while a chunk is hashed"
        super()._check(*chunk_and_data)


async def test_the_event_loop_goes_on_while_chunks_are_hashed(mesh: Mesh) -> None:
    await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    client = mesh.client()
    manifest, artifact_id = await client.get_manifest(version=0)
    held = HashedOnceTheLoopHasTurned(manifest, memory=np.zeros(manifest.payload_bytes, dtype=np.uint8))
    held.loop = asyncio.get_running_loop()
    downloader = Downloader(client, LinkLimits())
    try:
        await asyncio.wait_for(downloader.pull(held, artifact_id), 60.0)
    finally:
        await downloader.close()
    assert not held.missing


async def test_a_version_that_was_streamed_is_a_file_that_the_engine_s_processes_read(
    mesh: Mesh, tmp_path: Path
) -> None:
    published = make_state(1)
    await mesh.publisher(Transport.STREAM).publish(0, published)
    client = mesh.client()
    manifest, artifact_id = await client.get_manifest(version=0)
    downloader = Downloader(client, LinkLimits())
    try:
        fetcher = VersionFetcher(downloader, spool=Spool(tmp_path, "engine"))
        held = await asyncio.wait_for(fetcher.fetch(manifest, artifact_id), 60.0)
    finally:
        await downloader.close()
    found = load_file(held.files[0])
    assert found.keys() == published.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in held.tensors(manifest).items())
    assert all(torch.equal(found[name], tensor) for name, tensor in published.items())
    held.release()
    with pytest.raises(FileNotFoundError):
        load_file(held.files[0])


async def test_from_near_whole_chunks_are_asked_for_at_any_rate(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    client, fetch, asked = mesh.client(), WeightSyncClient.fetch, []

    def noted(client: WeightSyncClient, artifact_id: str, ranges: Any, chunk_bytes: int, **more: Any) -> Any:
        asked.append((*ranges[0], chunk_bytes))
        return fetch(client, artifact_id, ranges, chunk_bytes, **more)

    monkeypatch.setattr(WeightSyncClient, "fetch", noted)
    monkeypatch.setattr(downloads, "FIRST_CLAIM", 6000)
    monkeypatch.setattr(downloads, "NEAR_CLAIM", 3 * 4096)
    manifest, artifact_id = await client.get_manifest(version=0)
    downloader = Downloader(client, LinkLimits(connections=2))
    downloader.sources.choose(0.0).answered(sources.FAR_S / 2)
    held = VersionBytes(manifest, memory=np.zeros(manifest.payload_bytes, dtype=np.uint8))
    try:
        await asyncio.wait_for(downloader.pull(held, artifact_id), 60.0)
    finally:
        await downloader.close()
    ends = {chunk.offset + chunk.length for chunk in manifest.chunks}
    assert len(asked) > 1
    assert all(offset + length in ends and not chunk_bytes for offset, length, chunk_bytes in asked), asked


async def test_connections_that_much_came_over_from_far_away_are_new_before_the_next_version(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FAR_S", -1.0)
    monkeypatch.setattr(downloads, "RENEWED_FROM", 1)
    await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    client = mesh.client()
    manifest, artifact_id = await client.get_manifest(version=0)
    downloader = Downloader(client, LinkLimits(connections=3))
    connections, hub = downloader.connections, downloader.sources.choose(0.0)
    try:
        before: list[WeightSyncClient] = []
        for _ in range(2):
            held = VersionBytes(manifest, memory=np.zeros(manifest.payload_bytes, dtype=np.uint8))
            await asyncio.wait_for(downloader.pull(held, artifact_id), 60.0)
            assert not held.missing
            assert downloader._renewing is not None
            await asyncio.wait_for(downloader._renewing, 60.0)
            assert connections.get(hub, 0) not in (client, *before)
            before.append(connections.get(hub, 0))
    finally:
        await downloader.close()
    assert await client.epoch() == 1  # the first connection is others' as well


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_delta_is_used_while_the_rest_of_it_comes_and_let_go_where_it_does_not(
    mesh: Mesh, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    client, used = mesh.client(), threading.Event()
    manifest, _ = await client.get_manifest(version=0)
    check = VersionBytes._check

    def checked_once_used(held: VersionBytes, chunk: Any, data: Any) -> None:
        if chunk.offset:
            assert used.wait(10.0), "the first chunk was not used before the others came"
            if breaks:
                raise MeshError(Reason.UNKNOWN_VERSION, "the bytes are gone")
        check(held, chunk, data)

    def use(payload: Any, wait_for: Callable[[int], None]) -> None:
        wait_for(manifest.chunks[0].length)
        used.set()
        wait_for(len(payload))
        assert payload.any()

    monkeypatch.setattr(VersionBytes, "_check", checked_once_used)
    downloader = Downloader(client, LinkLimits())
    fetch = partial(VersionFetcher(downloader).fetch_delta, manifest, use)
    try:
        if breaks:
            with pytest.raises(MeshError, match="the bytes are gone"):
                await asyncio.wait_for(fetch(), 60.0)
        else:
            assert len(await asyncio.wait_for(fetch(), 60.0)) == manifest.payload_bytes
    finally:
        await downloader.close()


async def test_a_call_whose_connection_is_closed_for_another_call_s_failure_is_made_again(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    client, fetch = mesh.client(), WeightSyncClient.fetch
    manifest, artifact_id = await client.get_manifest(version=0)
    downloader = Downloader(client, LinkLimits())
    connections, source = downloader.connections, downloader.sources.choose(0.0)
    dropped = connections._clients[source.address, 0] = connections._open(source)

    async def cut(over: WeightSyncClient, *asked: Any, **more: Any) -> Any:
        async for piece in fetch(over, *asked, **more):
            yield piece
            if over is dropped and connections._clients.pop((source.address, 0), None) is not None:
                await over.close()

    monkeypatch.setattr(WeightSyncClient, "fetch", cut)
    held = VersionBytes(manifest, memory=np.zeros(manifest.payload_bytes, dtype=np.uint8))
    try:
        await asyncio.wait_for(downloader.pull(held, artifact_id), 60.0)
    finally:
        await downloader.close()
    assert not held.missing
    assert connections._clients[source.address, 0] is not dropped
