"""Uploads and seals that take long, break off, or meet a hub that comes back: what moves is never given up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from meshrl.client import WeightSyncClient
from meshrl.trainer.ranks.commands import CommandSender
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.versions import sources, uploads
from meshrl.versions.sources import LinkLimits
from meshrl.versions.store import VersionStore
from meshrl.versions.version_bytes import VersionBytes
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.frames import parse_upload
from meshrl.wire.types import Chunk, Transport, VersionState
from weight_mesh import MemoryEngine, Mesh, make_state


async def test_slow_upload_is_not_given_up_while_it_moves_nor_at_a_hiccup(mesh: Mesh, engine: MemoryEngine) -> None:
    publisher = mesh.publisher(Transport.STREAM, retry_for_s=3.0)
    create, broken = publisher.client.create_version, []

    async def slow_and_broken_once(manifest: Any, chunks: Any = None, **more: Any) -> Any:
        async def few() -> Any:
            count = 0
            async for chunk in chunks:
                count += 1
                if count == 8 and not broken:
                    broken.append(True)
                    raise MeshError(Reason.UNREACHABLE, "the link broke")
                if not broken:  # seven waits are longer than retry_for_s, and each is far shorter
                    await asyncio.sleep(0.5)
                yield chunk

        return await create(manifest, None if chunks is None else few(), **more)

    publisher.client.create_version = slow_and_broken_once
    loop, commands = asyncio.get_running_loop(), CommandSender(RankGroup(), heartbeat_s=0.1)
    publication = asyncio.run_coroutine_threadsafe(publisher.publish(0, make_state(1)), loop)

    def moving() -> float:
        left_s = publisher.progress.left_s(3.0)
        assert left_s > 0, "nothing moved for 3 s"
        return left_s

    report = await asyncio.to_thread(commands.wait, publication, check=moving)
    assert broken
    assert report.parts_s["stage"] > 3.0
    mesh.start_agent("e0", engine)
    await mesh.activate(0)
    assert engine.root == report.root


async def test_a_hub_of_this_machine_is_sent_chunks_over_one_connection_however_slow_it_answers(mesh: Mesh) -> None:
    publisher = mesh.publisher(Transport.STREAM)
    prepared = await publisher.prepare(0, make_state(1))
    client = mesh.client()
    epoch = client.epoch

    async def overloaded() -> int:
        await asyncio.sleep(2 * sources.FAR_S)
        return await epoch()

    client.epoch = overloaded  # type: ignore[method-assign]  # a busy machine
    uploader = uploads.Uploader(client, publisher.progress, limits=LinkLimits(connections=3))
    await uploader.stage(prepared.manifest, prepared.buffer)
    assert uploader.connections == 1
    await uploader.close()


async def test_a_hub_far_away_is_sent_chunks_over_several_connections(
    mesh: Mesh, engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FAR_S", -1.0)
    publisher = mesh.publisher(Transport.STREAM)
    prepared = await publisher.prepare(0, make_state(1))
    uploader = uploads.Uploader(mesh.client(), publisher.progress, limits=LinkLimits(connections=3))
    create, all_send = WeightSyncClient.create_version, asyncio.Barrier(3)
    sent: dict[WeightSyncClient, list[int]] = {}
    broken: list[WeightSyncClient] = []

    async def noted(client: WeightSyncClient, manifest: Any, chunks: Any = None, **more: Any) -> Any:
        async def passed_on() -> Any:
            async for chunk in chunks:
                if client not in sent and not broken:
                    sent[client] = []
                    await all_send.wait()
                elif not broken:
                    broken.append(client)
                    raise MeshError(Reason.UNREACHABLE, "the link broke")
                sent.setdefault(client, []).append(parse_upload(chunk).offset)
                yield chunk

        return await create(client, manifest, None if chunks is None else passed_on(), **more)

    monkeypatch.setattr(WeightSyncClient, "create_version", noted)
    staged = await uploader.stage(prepared.manifest, prepared.buffer)
    await uploader.seal(prepared.manifest, staged.artifact_id, "")
    await uploader.close()
    offsets = [offset for of_client in sent.values() for offset in of_client]
    wanted = {chunk.offset for chunk in prepared.manifest.chunks}
    assert len(broken) == 1
    assert set(offsets) == wanted
    assert len(offsets) <= len(wanted) + 1  # what was under way on the broken one, by another
    mesh.start_agent("e0", engine)
    await mesh.client().activate_version(run_id="run", version=0, prepare_deadline_s=60.0)
    assert engine.root == prepared.manifest.result_root


async def test_upload_that_stands_still_ends(mesh: Mesh) -> None:
    publisher = mesh.publisher(Transport.STREAM)
    manifest = (await publisher.prepare(0, make_state(1))).manifest

    async def nothing() -> Any:
        await asyncio.Event().wait()
        yield Chunk(offset=0, data=b"", crc32c=0)

    with pytest.raises(MeshError, match=r"nothing of the upload of version 0 moved for 0\.3 s") as caught:
        await asyncio.wait_for(mesh.client().create_version(manifest, nothing(), stall_s=0.3), 60.0)
    assert caught.value.reason is Reason.UNREACHABLE


async def test_seal_that_takes_longer_than_its_call_goes_on_and_hashes_once(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = mesh.publisher(Transport.FILESYSTEM)
    verify, go_on, hashed = VersionBytes.verify, threading.Event(), []

    def slow(*arguments: Any) -> None:
        hashed.append(arguments[0].manifest)
        go_on.wait(60.0)
        verify(*arguments)

    monkeypatch.setattr(VersionBytes, "verify", slow)
    manifest = (await publisher.prepare(0, make_state(1))).manifest
    client = mesh.client()
    artifact = (await client.create_version(manifest)).artifact_id
    named = {"run_id": "run", "epoch": 1, "version": 0, "artifact_id": artifact}
    with pytest.raises(MeshError) as late:
        await client.seal_version(**named, deadline_s=0.2)
    assert late.value.reason is Reason.DEADLINE_PASSED
    again = asyncio.create_task(client.seal_version(**named))
    await asyncio.sleep(0.2)
    go_on.set()
    assert (await again).state is VersionState.SEALED
    assert (await client.seal_version(**named)).state is VersionState.SEALED
    assert hashed == [manifest]


async def test_publisher_seals_though_the_hub_restarts_and_lost_what_it_had(
    mesh: Mesh, engine: MemoryEngine, transport: Transport
) -> None:
    publisher = mesh.publisher(transport, retry_for_s=20.0)
    seal, restarted = publisher.client.seal_version, []

    async def after_a_restart(**named: Any) -> Any:
        if not restarted:
            restarted.append(True)
            await mesh.kill_hub()
            for payload in (mesh.folder / "weight_hub" / "artifacts").glob("*/payload"):
                payload.write_bytes(bytes(payload.stat().st_size))
            asyncio.get_running_loop().call_later(0.5, lambda: asyncio.ensure_future(mesh.start_hub()))
        return await seal(**named)

    publisher.client.seal_version = after_a_restart
    report = await publisher.publish(0, make_state(1))
    mesh.start_agent("e0", engine)
    await mesh.client().activate_version(run_id="run", version=0, prepare_deadline_s=20.0)
    assert engine.root == report.root


@pytest.fixture
def slow_deletes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Bytes are not deleted before it is set."""
    go_on, delete = threading.Event(), VersionStore.delete

    def held_up(store: VersionStore, artifact_id: str, paths: Any) -> None:
        assert go_on.wait(30.0)
        delete(store, artifact_id, paths)

    monkeypatch.setattr(VersionStore, "delete", held_up)
    return go_on


async def test_versions_go_on_while_bytes_of_older_ones_are_deleted(
    mesh: Mesh, engine: MemoryEngine, transport: Transport, slow_deletes: threading.Event
) -> None:
    mesh.start_agent("e0", engine)
    publisher = mesh.publisher(transport)
    for version in range(5):
        await publisher.publish(version, make_state(version + 1))
        await mesh.activate(version)
    store = mesh.hub._store
    assert len(store.artifacts) == 5
    slow_deletes.set()
    await mesh.until(lambda: len(store.artifacts) == 2)


async def test_an_abort_is_answered_and_the_version_staged_again_after_its_bytes_are_deleted(
    mesh: Mesh, engine: MemoryEngine, slow_deletes: threading.Event
) -> None:
    publisher, client = mesh.publisher(Transport.STREAM), mesh.client()
    prepared = await publisher.prepare(0, make_state(1))
    staged = await client.create_version(prepared.manifest)
    aborting = asyncio.create_task(client.abort_version(run_id="run", epoch=1, version=0, message="later"))
    await mesh.until(lambda: staged.artifact_id in mesh.hub._deleting)
    again = asyncio.create_task(publisher.publish(0, make_state(1)))
    await asyncio.sleep(0.3)
    assert not aborting.done()
    assert not again.done()
    slow_deletes.set()
    await asyncio.gather(aborting, again)
    mesh.start_agent("e0", engine)
    await mesh.activate(0)
    assert engine.holds(make_state(1))
