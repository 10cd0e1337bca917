"""A version comes to a host while its engine starts: what is taken, what is dropped, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
import torch

from cut_link import CutLink
from meshrl.core.config.shared import WeightBroadcastConfig
from meshrl.core.private_folders import SHM
from meshrl.inference.agent.ahead import VersionAhead
from meshrl.inference.agent.version_loader import VersionFetcher
from meshrl.versions.downloads import Downloader
from meshrl.versions.sources import LinkLimits
from meshrl.wire.types import Manifest, Transport
from polling import until
from unnamed_files import unnamed_files
from weight_mesh import MemoryEngine, Mesh, make_state

SLOW_MBPS = 0.1  # 45 kB at this rate take 3.6 s


@pytest.fixture(autouse=True)
async def other_engine(mesh: Mesh) -> None:
    """The engine that versions are decided for."""
    mesh.start_agent("e0", MemoryEngine(make_state(0)))


@pytest.fixture
async def ahead(mesh: Mesh) -> AsyncIterator[VersionAhead]:
    made = VersionAhead(WeightBroadcastConfig(address=f"127.0.0.1:{mesh.port}"))
    yield made
    await made.close()


def files() -> set[int]:
    gc.collect()  # the traceback of a fetch that was cancelled leads to its file
    return unnamed_files(SHM)


async def decide(mesh: Mesh, version: int) -> None:
    await mesh.client().activate_version(run_id="run", version=version, prepare_deadline_s=10.0)


async def newest(mesh: Mesh) -> tuple[Manifest, str]:
    return await mesh.client().get_manifest()


async def until_all_came(ahead: VersionAhead, artifact_id: str) -> None:
    await until(lambda: ahead.came == artifact_id, 60.0)


async def test_an_engine_applies_what_came_before_it_served(mesh: Mesh, ahead: VersionAhead) -> None:
    published = make_state(1)
    await mesh.publisher(Transport.STREAM).publish(0, published)
    await decide(mesh, 0)
    ahead.begin()
    await until_all_came(ahead, (await newest(mesh))[1])
    assert len(files()) == 1
    engine = MemoryEngine(make_state(0))
    agent = mesh.start_agent("e1", engine, ahead=ahead)
    await mesh.until(lambda: engine.version == 0)
    assert engine.holds(published)
    assert agent.downloader.taken_bytes == 0
    await mesh.until(lambda: not files())


async def test_a_newer_version_takes_the_place_of_an_older_one(mesh: Mesh, ahead: VersionAhead) -> None:
    publisher = mesh.publisher(Transport.STREAM)
    await publisher.publish(0, make_state(1))
    await decide(mesh, 0)
    ahead.begin()
    (_, first) = await newest(mesh)
    await until_all_came(ahead, first)
    before = files()
    await publisher.publish(1, make_state(2))
    await decide(mesh, 1)
    manifest, second = await newest(mesh)
    await until_all_came(ahead, second)
    assert len(files()) == 1
    assert files() != before
    held = await ahead.take(second)
    assert held is not None
    assert all(torch.equal(held.tensors(manifest)[name], tensor) for name, tensor in make_state(2).items())
    held.release()
    del held
    await until(lambda: not files())


async def test_the_whole_version_stays_while_deltas_lead_on_from_it(mesh: Mesh, ahead: VersionAhead) -> None:
    state = make_state(1)
    publisher = mesh.publisher(Transport.STREAM, anchor_every=8)
    await publisher.publish(0, state)
    await decide(mesh, 0)
    ahead.begin()
    (_, whole) = await newest(mesh)
    await until_all_came(ahead, whole)
    before = files()
    changed = {name: tensor.clone() for name, tensor in state.items()}
    changed["model.norm.weight"][0] += 1.0
    await publisher.publish(1, changed)
    await decide(mesh, 1)
    engine = MemoryEngine(make_state(0))
    agent = mesh.start_agent("e1", engine, ahead=ahead)
    await mesh.until(lambda: engine.version == 1)
    assert engine.holds(changed)
    assert before
    assert 0 < agent.downloader.taken_bytes < 4096


async def test_bytes_of_another_version_are_dropped_and_none_come_later(mesh: Mesh, ahead: VersionAhead) -> None:
    publisher = mesh.publisher(Transport.STREAM)
    await publisher.publish(0, make_state(1))
    await decide(mesh, 0)
    ahead.begin()
    await until_all_came(ahead, (await newest(mesh))[1])
    assert await ahead.take("another") is None
    await until(lambda: not files())
    await publisher.publish(1, make_state(2))
    await decide(mesh, 1)
    assert await ahead.take((await newest(mesh))[1]) is None


async def test_a_fetch_on_its_way_is_joined_and_its_end_leaves_no_file(mesh: Mesh) -> None:
    broadcast = WeightBroadcastConfig(address=f"127.0.0.1:{mesh.port}", max_mbps=SLOW_MBPS / 20)
    ahead = VersionAhead(broadcast)
    try:
        await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
        await decide(mesh, 0)
        manifest, artifact_id = await newest(mesh)
        ahead.begin()
        await until(lambda: bool(files()), 30.0)
        downloader = Downloader(mesh.client(), LinkLimits())
        fetcher = VersionFetcher(downloader, ahead=ahead.take)
        fetching = asyncio.create_task(fetcher.fetch(manifest, artifact_id))
        await asyncio.sleep(0.1)
        assert not fetching.done()
        fetching.cancel()
        await asyncio.wait({fetching})
        del fetching
        await until(lambda: not files())
        assert downloader.taken_bytes == 0
        await downloader.close()
    finally:
        await ahead.close()


async def test_it_goes_on_where_the_link_broke(mesh: Mesh) -> None:
    published = make_state(1)
    await mesh.publisher(Transport.STREAM).publish(0, published)
    await decide(mesh, 0)
    manifest, artifact_id = await newest(mesh)
    with CutLink(f"127.0.0.1:{mesh.port}") as link:
        ahead = VersionAhead(WeightBroadcastConfig(address=link.address, max_mbps=SLOW_MBPS))
        try:
            ahead.begin()
            await until(lambda: bool(files()), 30.0)
            await asyncio.to_thread(link.cut)
            link.mend()
            held = await asyncio.wait_for(ahead.take(artifact_id), 60.0)
            assert held is not None
            assert all(torch.equal(held.tensors(manifest)[name], tensor) for name, tensor in published.items())
            held.release()
        finally:
            await ahead.close()


async def test_files_that_this_host_can_read_do_not_come(mesh: Mesh, ahead: VersionAhead) -> None:
    await mesh.publisher(Transport.FILESYSTEM).publish(0, make_state(1))
    await decide(mesh, 0)
    ahead.begin()
    (_, readable) = await newest(mesh)
    await asyncio.sleep(0.5)
    assert not files()
    await mesh.publisher(Transport.STREAM).publish(1, make_state(2))
    await decide(mesh, 1)
    await until_all_came(ahead, (await newest(mesh))[1])
    assert len(files()) == 1
    assert await ahead.take(readable) is None


async def test_a_hub_that_is_away_keeps_no_engine_waiting() -> None:
    ahead = VersionAhead(WeightBroadcastConfig(address="127.0.0.1:9"))
    ahead.begin()
    await asyncio.sleep(0.2)
    assert await ahead.take("any") is None
    await asyncio.wait_for(ahead.close(), 60.0)
    assert not files()
