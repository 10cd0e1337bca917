"""Damage, deaths and restarts: an engine never serves what it should not, and the next version goes through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google_crc32c
import pytest

from inference_kit import line_of
from meshrl.core.clock import Clock
from meshrl.orchestrator.config import DeadlinesConfig
from meshrl.orchestrator.peers.version_relay import VersionRelay
from meshrl.sampling.retry import RunError
from meshrl.versions import version_bytes
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import artifact_id, build_manifest
from meshrl.wire.types import (
    ActivationPolicy,
    AgentState,
    Chunk,
    CollectivePlan,
    Manifest,
    TensorEntry,
    Transport,
    VersionState,
)  # fmt: skip
from weight_mesh import MemoryEngine, Mesh, make_state


def flip_a_byte(mesh: Mesh, transport: Transport, version: int, artifact: str) -> None:
    """Changes one payload byte at rest, where the transport keeps it."""
    if transport is Transport.STREAM:
        path = mesh.folder / "weight_hub" / "artifacts" / artifact / "payload"
    else:
        path = max((mesh.folder / "broadcasts" / f"step_{version}").glob("*-of-*.safetensors"))
    with Path(path).open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)[0]
        file.seek(-100, 2)
        file.write(bytes((byte ^ 0x10,)))


async def test_corrupt_version_is_refused_old_one_served_and_next_one_goes_through(
    mesh: Mesh, engine: MemoryEngine, transport: Transport
) -> None:
    publisher = mesh.publisher(transport)
    agent = mesh.start_agent("e0", engine)
    await publisher.publish(0, make_state(1))
    await mesh.activate(0)
    await mesh.kill_agent("e0")  # so that it prepares version 1 only after the damage

    report = await publisher.publish(1, make_state(2))
    flip_a_byte(mesh, transport, 1, report.artifact_id)
    agent = mesh.start_agent("e0", engine)
    await mesh.until(lambda: any(one.last_fault is not None for one in mesh.hub.list_engines("")))
    fault = mesh.hub.list_engines("")[0].last_fault
    assert fault.reason == Reason.DIGEST_MISMATCH.name
    with pytest.raises(MeshError, match="e0 refused it") as caught:
        await mesh.activate(1)
    assert caught.value.reason is Reason.ENGINES_NOT_READY
    assert caught.value.metadata == {"e0": "DIGEST_MISMATCH"}
    assert engine.version == 0
    assert engine.holds(make_state(1))
    assert not engine.paused
    (info,) = await mesh.client().list_engines()
    assert (info.state, info.serving_version, info.routable) == (AgentState.READY, 0, True)
    assert mesh.hub.coordinator.line("run").find(1).state is VersionState.SEALED

    await publisher.publish(2, make_state(3))
    await mesh.activate(2)
    assert engine.version == 2
    assert engine.holds(make_state(3))
    assert line_of(agent).version == 2
    assert mesh.hub.coordinator.line("run").find(1).state is VersionState.ABORTED


async def test_damaged_version_can_be_published_again_under_a_new_artifact(
    mesh: Mesh, engine: MemoryEngine, transport: Transport
) -> None:
    publisher = mesh.publisher(transport)
    first = await publisher.publish(0, make_state(1))
    flip_a_byte(mesh, transport, 0, first.artifact_id)
    mesh.start_agent("e0", engine)
    await mesh.until_registered()
    with pytest.raises(MeshError, match="DIGEST_MISMATCH"):
        await mesh.activate(0)
    client = mesh.client()
    dropped = await client.abort_version(run_id="run", epoch=1, version=0, message="damaged")
    assert dropped.state is VersionState.ABORTED
    again = await publisher.publish(0, make_state(2))
    assert again.artifact_id != first.artifact_id
    await mesh.activate(0)
    assert engine.holds(make_state(2))


async def test_seal_refuses_files_that_changed_after_they_were_hashed(mesh: Mesh) -> None:
    publisher = mesh.publisher(Transport.FILESYSTEM)
    client, stage = mesh.client(), publisher.client.create_version

    async def damage_then_stage(manifest: Manifest, chunks: Any = None, **more: Any) -> Any:
        staged = await stage(manifest, chunks, **more)
        flip_a_byte(mesh, Transport.FILESYSTEM, 0, "")
        return staged

    publisher.client.create_version = damage_then_stage
    with pytest.raises(MeshError, match="changed at rest") as caught:
        await publisher.publish(0, make_state(1))
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    with pytest.raises(MeshError) as unsealed:
        await client.activate_version(run_id="run", version=0, prepare_deadline_s=1.0)
    assert unsealed.value.reason is Reason.VERSION_NOT_SEALED


@pytest.mark.parametrize("alone", [False, True])
async def test_engine_that_joins_a_damaged_version_is_not_routed_to_and_does_not_stop_the_next_one(
    mesh: Mesh, engine: MemoryEngine, transport: Transport, alone: bool
) -> None:
    publisher = mesh.publisher(transport)
    mesh.start_agent("sound", engine)
    report = await publisher.publish(0, make_state(1))
    await mesh.activate(0)
    flip_a_byte(mesh, transport, 0, report.artifact_id)
    if alone:
        await mesh.kill_agent("sound")
    late = MemoryEngine(make_state(7))
    mesh.start_agent("late", late)
    await mesh.until(lambda: any(one.last_fault is not None for one in mesh.hub.list_engines("")))
    assert {info.engine_id: info.routable for info in await mesh.client().list_engines()}["late"] is False
    await publisher.publish(1, make_state(2))
    await mesh.activate(1)
    await mesh.until(lambda: late.version == 1 and all(info.routable for info in mesh.hub.list_engines("")))
    assert late.holds(make_state(2))


async def test_torn_engine_serves_nothing_until_it_is_seeded_again(mesh: Mesh, engine: MemoryEngine) -> None:
    publisher = mesh.publisher(Transport.FILESYSTEM)
    mesh.start_agent("e0", engine)
    await publisher.publish(0, make_state(1))
    await mesh.activate(0)
    engine.fail_apply = True
    await publisher.publish(1, make_state(2))
    commit = asyncio.create_task(mesh.activate(1))
    await mesh.until(lambda: mesh.hub.list_engines("")[0].state is AgentState.POISONED)
    (info,) = mesh.hub.list_engines("")
    assert not info.routable
    assert info.last_fault is not None
    assert info.last_fault.reason == Reason.ENGINE_FAILED.name
    assert engine.paused
    activation = await commit  # the decision goes forward: the same version is seeded again
    assert activation.version.state is VersionState.COMMITTED
    assert engine.holds(make_state(2))
    assert not engine.paused
    assert mesh.hub.list_engines("")[0].routable


async def test_agent_killed_between_prepare_and_commit_is_waited_for_until_its_lease_is_over_and_catches_up(
    mesh: Mesh, engine: MemoryEngine
) -> None:
    publisher = mesh.publisher(Transport.STREAM)
    mesh.start_agent("steady", engine)
    killed = MemoryEngine(make_state(5))
    mesh.start_agent("killed", killed)
    await mesh.until_registered(2)
    await publisher.publish(0, make_state(1))
    await mesh.until(lambda: killed.shadow is not None)
    await mesh.kill_agent("killed")
    activation = await mesh.activate(0)
    assert [report.engine_id for report in activation.engines] == ["steady"]
    assert [info.engine_id for info in await mesh.client().list_engines()] == ["steady"]
    assert killed.version is None
    restarted = MemoryEngine(make_state(5))
    mesh.start_agent("killed", restarted)
    await mesh.until(lambda: restarted.version == 0)
    assert restarted.holds(make_state(1))
    await mesh.until(lambda: all(info.routable for info in mesh.hub.list_engines("")))


async def test_restarted_hub_replays_its_log_and_goes_forward(
    mesh: Mesh, engine: MemoryEngine, transport: Transport
) -> None:
    publisher = mesh.publisher(transport)
    mesh.start_agent("e0", engine)
    await publisher.publish(0, make_state(1))
    first = await mesh.activate(0)
    await publisher.publish(1, make_state(2))
    await mesh.restart_hub()
    states = {r.version: r.state for r in mesh.hub.coordinator.line("run").records.values()}
    assert states == {0: VersionState.COMMITTED, 1: VersionState.SEALED}
    assert await mesh.activate(0) == first
    with pytest.raises(MeshError) as stale:
        await mesh.publisher(transport, epoch=0 + 1).publish(0, make_state(9))
    assert stale.value.reason is Reason.VERSION_CONFLICT
    activation = await mesh.activate(1)
    assert engine.version == 1
    assert engine.holds(make_state(2))
    assert activation.engines[0].applied.version == 1
    await publisher.publish(2, make_state(3))
    await mesh.activate(2)
    assert engine.holds(make_state(3))


async def test_a_hub_killed_while_a_version_is_written_over_an_earlier_one_goes_on_with_the_rest(
    mesh: Mesh, engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_bytes, "PART_BYTES", 3 * 4096)
    publisher = mesh.publisher(Transport.STREAM)
    create, room = publisher.client.create_version, mesh.folder / "weight_hub" / "artifacts" / "room"
    cut: list[int] = []

    async def some(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        for _ in range(5):
            yield await anext(chunks)

    async def killed_after_some(manifest: Manifest, chunks: Any = None, **more: Any) -> Any:
        if chunks is None or manifest.version < 3 or cut:
            return await create(manifest, chunks, **more)
        cut.append(manifest.version)
        staged = await create(manifest, some(chunks), **more)
        assert len(staged.missing_offsets) == len(manifest.chunks) - 5
        assert not room.exists()
        await mesh.restart_hub()
        assert (await create(manifest)).missing_offsets == staged.missing_offsets
        raise MeshError(Reason.UNREACHABLE, "the hub was killed")

    publisher.client.create_version = killed_after_some
    mesh.start_agent("e0", engine)
    for version in range(4):
        if version == 3:
            await mesh.until(room.exists)  # of version 0, which is deleted
        await publisher.publish(version, make_state(version + 1))
        await mesh.until_registered()
        await mesh.activate(version)
        assert engine.holds(make_state(version + 1))
    assert cut == [3]


async def test_a_hub_killed_in_each_state_of_a_streamed_version_goes_on_with_it(
    mesh: Mesh, engine: MemoryEngine
) -> None:
    publisher = mesh.publisher(Transport.STREAM)
    client, staged = mesh.client(), asyncio.Event()
    create = publisher.client.create_version

    async def kill_when_staged(manifest: Manifest, chunks: Any = None, **more: Any) -> Any:
        answer = await create(manifest, chunks, **more)
        if not staged.is_set():
            staged.set()
            await mesh.restart_hub()
        return answer

    publisher.client.create_version = kill_when_staged
    mesh.start_agent("e0", engine)
    report = await publisher.publish(0, make_state(1))
    assert staged.is_set()
    await mesh.until(lambda: engine.shadow is not None)

    await mesh.restart_hub()  # sealed
    assert mesh.hub.coordinator.line("run").find(0).state is VersionState.SEALED
    hang = asyncio.Event()

    async def wait_for_it() -> None:
        await hang.wait()

    engine.before_apply = wait_for_it
    await mesh.until_registered()
    committing = asyncio.create_task(mesh.activate(0))
    await mesh.until(lambda: "pause" in engine.history)

    await mesh.restart_hub()  # decided, and being applied
    assert mesh.hub.coordinator.line("run").find(0).state is VersionState.COMMITTING
    hang.set()
    activation = await client.activate_version(run_id="run", version=0, prepare_deadline_s=30.0)
    await asyncio.wait({committing})
    assert activation.version.state is VersionState.COMMITTED
    assert engine.holds(make_state(1))
    assert engine.root == report.root
    assert engine.history.count("apply 0") == 1


async def test_same_commit_twice_returns_the_first_answer(mesh: Mesh, engine: MemoryEngine) -> None:
    mesh.start_agent("e0", engine)
    publisher = mesh.publisher(Transport.FILESYSTEM)
    await publisher.publish(0, make_state(1))
    first, joined = await asyncio.gather(mesh.activate(0), mesh.activate(0))
    assert first == joined
    await publisher.publish(1, make_state(2))
    await mesh.activate(1)
    assert await mesh.activate(0) == first
    assert engine.version == 1
    assert engine.history.count("apply 0") == 1


async def test_stale_epoch_is_refused_everywhere(mesh: Mesh, engine: MemoryEngine, transport: Transport) -> None:
    mesh.start_agent("e0", engine)
    old = mesh.publisher(transport, epoch=1)
    report = await old.publish(3, make_state(1))
    await mesh.activate(3)
    await mesh.publisher(transport, epoch=2).publish(2, make_state(2))
    client = mesh.client()
    for call in (
        old.publish(4, make_state(3)),
        client.seal_version(run_id="run", epoch=1, version=3, artifact_id=report.artifact_id),
        client.abort_version(run_id="run", epoch=1, version=3, message=""),
    ):
        with pytest.raises(MeshError) as caught:
            await call
        assert caught.value.reason is Reason.STALE_EPOCH
    await mesh.activate(2)  # a lower number, but of the later epoch
    assert engine.version == 2
    assert engine.holds(make_state(2))


async def test_activation_without_engines_waits_for_one_and_then_gives_up(mesh: Mesh, engine: MemoryEngine) -> None:
    await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    with pytest.raises(MeshError, match="no engine is registered") as caught:
        await mesh.activate(0, prepare_deadline_s=0.3)
    assert caught.value.reason is Reason.ENGINES_NOT_READY
    waiting = asyncio.create_task(mesh.activate(0))
    await asyncio.sleep(0.1)
    mesh.start_agent("e0", engine)
    assert (await waiting).version.state is VersionState.COMMITTED


async def test_engine_of_another_model_is_refused_with_what_differs(mesh: Mesh) -> None:
    other = MemoryEngine(make_state(1))
    other.live["model.norm.weight"] = other.live["model.norm.weight"][:-1]
    mesh.start_agent("other", other)
    await mesh.until_registered()
    await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    with pytest.raises(MeshError, match=r"model\.norm\.weight is float32 \(32,\), got float32 \(33,\)") as caught:
        await mesh.activate(0)
    assert caught.value.metadata == {"other": "LAYOUT_MISMATCH"}


SENTENCE = "staging version 0 ran out of memory on cuda:0: 742.00 MiB more were asked for; lower this"


async def no_memory() -> None:
    raise MeshError(Reason.OUT_OF_MEMORY, SENTENCE)


def relay(mesh: Mesh) -> VersionRelay:
    """The orchestrator's, with five minutes of patience."""
    return VersionRelay(
        mesh.client(), run_id="run", policy=ActivationPolicy.ROLLING, deadlines=DeadlinesConfig(), clock=Clock()
    )


async def test_run_whose_only_engine_has_no_memory_for_its_first_version_ends_at_once_and_with_that_sentence(
    mesh: Mesh, engine: MemoryEngine
) -> None:
    engine.before_stage = no_memory
    mesh.start_agent("e0", engine)
    await mesh.until_registered()
    await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    async with asyncio.timeout(60.0):  # of 300
        with pytest.raises(RunError, match=f"e0 refused it \\(OUT_OF_MEMORY: {SENTENCE}\\)"):
            await relay(mesh).activate_first(0)


async def test_run_waits_on_where_one_engine_of_two_has_no_memory(mesh: Mesh) -> None:
    refusing, fitting = MemoryEngine(make_state(1)), MemoryEngine(make_state(2))
    refusing.before_stage = no_memory
    mesh.start_agent("e0", refusing)
    mesh.start_agent("e1", fitting)
    await mesh.until_registered(2)
    await mesh.publisher(Transport.STREAM).publish(0, make_state(3))
    activation = asyncio.create_task(relay(mesh).activate_first(0))
    await mesh.until(lambda: any(engine.last_fault is not None for engine in mesh.hub.list_engines("")))
    await mesh.kill_agent("e0")  # somebody takes it away
    async with asyncio.timeout(60.0):
        assert (await activation).version.state is VersionState.COMMITTED
    assert fitting.holds(make_state(3))


async def test_a_number_of_another_epoch_is_refused_by_its_content_and_what_the_trainer_made_anew_is_activated(
    mesh: Mesh, engine: MemoryEngine
) -> None:
    mesh.start_agent("e0", engine)
    before = await mesh.publisher(Transport.STREAM, epoch=1).publish(0, make_state(1))
    anew = await mesh.publisher(Transport.STREAM, epoch=2).publish(0, make_state(2))
    with pytest.raises(MeshError) as refused:
        await mesh.client().activate_version(
            run_id="run", version=0, prepare_deadline_s=30.0, artifact_id=before.artifact_id
        )
    assert refused.value.reason is Reason.VERSION_CONFLICT
    trainer = SimpleNamespace(step=0, epoch=2)  # as a watcher sees it
    activation = await relay(mesh).activate(0, trainer, before.artifact_id)
    assert activation is not None
    assert (activation.version.epoch, activation.version.artifact_id) == (2, anew.artifact_id)
    assert engine.holds(make_state(2))


async def pieces(chunks: list[Chunk]) -> Any:
    for chunk in chunks:
        yield chunk


async def test_upload_resumes_with_the_chunks_that_are_missing(mesh: Mesh, engine: MemoryEngine) -> None:
    publisher = mesh.publisher(Transport.STREAM)
    prepared = await publisher.prepare(0, make_state(1))
    manifest, whole = prepared.manifest, prepared.buffer.tobytes()
    chunks = [
        Chunk(offset=c.offset, data=(d := whole[c.offset : c.offset + c.length]), crc32c=google_crc32c.value(d))
        for c in manifest.chunks
    ]
    client = mesh.client()
    some = await client.create_version(manifest, pieces([chunks[4], chunks[1]]))
    assert some.missing_offsets == tuple(c.offset for i, c in enumerate(chunks) if i not in (1, 4))
    await mesh.restart_hub()  # what had arrived is found again
    client = mesh.client()
    rest = [c for i, c in enumerate(chunks) if i not in (1, 4)]
    assert (await client.create_version(manifest)).missing_offsets == some.missing_offsets
    assert (await client.create_version(manifest, pieces(rest))).missing_offsets == ()
    await client.seal_version(run_id="run", epoch=1, version=0, artifact_id=artifact_id(manifest))
    mesh.start_agent("e0", engine)
    await mesh.activate(0)
    assert engine.holds(make_state(1))


async def test_publisher_outlives_a_hub_that_is_away(mesh: Mesh, engine: MemoryEngine, transport: Transport) -> None:
    publisher = mesh.publisher(transport, retry_for_s=10.0)
    await mesh.kill_hub()
    publishing = asyncio.create_task(publisher.publish(0, make_state(1)))
    await asyncio.sleep(0.3)
    await mesh.start_hub()
    report = await publishing
    mesh.start_agent("e0", engine)
    await mesh.activate(0)
    assert engine.root == report.root


async def test_fetch_of_a_range_returns_exactly_its_bytes(mesh: Mesh, transport: Transport) -> None:
    report = await mesh.publisher(transport).publish(0, make_state(1))
    client = mesh.client()
    whole = b"".join([bytes(chunk.data) async for chunk in client.fetch(report.artifact_id)])
    assert len(whole) == report.num_bytes
    parts = [c async for c in client.fetch(report.artifact_id, [(4000, 300), (20000, 9000)], 4096)]
    assert b"".join(bytes(c.data) for c in parts) == whole[4000:4300] + whole[20000:29000]
    assert all(google_crc32c.value(bytes(c.data)) == c.crc32c for c in parts)
    with pytest.raises(MeshError) as outside:
        _ = [c async for c in client.fetch(report.artifact_id, [(report.num_bytes, 1)])]
    assert outside.value.reason is Reason.INVALID_REQUEST


async def test_superseded_fetch_is_abandoned_for_the_newest_version(mesh: Mesh, engine: MemoryEngine) -> None:
    publisher = mesh.publisher(Transport.FILESYSTEM)
    mesh.start_agent("e0", engine)
    await mesh.until_registered()
    for version in range(3):
        await publisher.publish(version, make_state(version + 1))
    await mesh.activate(2)
    assert engine.holds(make_state(3))
    assert [h for h in engine.history if h.startswith("apply")] == ["apply 2"]
    with pytest.raises(MeshError) as superseded:
        await mesh.activate(1)
    assert superseded.value.reason is Reason.VERSION_SUPERSEDED


async def test_a_version_that_travels_in_a_group_has_no_bytes_at_the_hub(mesh: Mesh) -> None:
    tensor = TensorEntry(name="w", dtype="float32", shape=(1,), offset=0, num_bytes=4, digest=bytes(16))
    plan = CollectivePlan(num_senders=1, bucket_bytes=64)
    manifest = build_manifest(
        run_id="run", epoch=1, version=0, transport=Transport.NCCL, tensors=(tensor,), chunks=(), collective=plan
    )
    client = mesh.client()
    staged = await client.create_version(manifest)
    assert staged.missing_offsets == ()
    await client.seal_version(run_id="run", epoch=1, version=0, artifact_id=staged.artifact_id)
    assert await client.get_manifest(artifact_id=staged.artifact_id) == (manifest, staged.artifact_id)
    with pytest.raises(MeshError, match="join the publisher's next group") as caught:
        _ = [chunk async for chunk in client.fetch(staged.artifact_id)]
    assert caught.value.reason is Reason.NOT_SUPPORTED
    await client.abort_version(run_id="run", epoch=1, version=0, message="")
    folder = mesh.folder / "weight_hub" / "artifacts"
    await mesh.until(lambda: list(folder.iterdir()) == [])
