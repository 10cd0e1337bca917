"""Engines follow the upload of a streamed version: they fetch what is at the hub while the rest still comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import pytest
import torch

from inference_kit import line_of
from meshrl.inference.agent.agent import WeightAgent
from meshrl.weights import byte_server
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import artifact_id
from meshrl.wire.types import AgentState, Chunk, Manifest, StagedVersion, Transport, VersionState
from weight_mesh import MemoryEngine, Mesh, make_state


@dataclass(kw_only=True)
class Upload:
    """A version that a test sends chunk by chunk."""

    client: Any
    manifest: Manifest
    chunks: tuple[Chunk, ...]
    outbox: asyncio.Queue[Chunk | None] = field(default_factory=asyncio.Queue)
    staging: asyncio.Task[StagedVersion] | None = None

    @classmethod
    async def of(cls, mesh: Mesh, version: int, state: Mapping[str, torch.Tensor]) -> Upload:
        prepared = await mesh.publisher(Transport.STREAM).prepare(version, state)
        manifest, whole = prepared.manifest, prepared.buffer.tobytes()
        data = [whole[chunk.offset : chunk.offset + chunk.length] for chunk in manifest.chunks]
        chunks = tuple(
            Chunk(offset=chunk.offset, data=piece, crc32c=google_crc32c.value(piece))
            for chunk, piece in zip(manifest.chunks, data, strict=True)
        )
        return cls(client=mesh.client(), manifest=manifest, chunks=chunks)

    @property
    def artifact_id(self) -> str:
        return artifact_id(self.manifest)

    def send(self, chunks: Sequence[Chunk]) -> None:
        """Sends more of it; the upload stays open."""
        if self.staging is None:
            self.staging = asyncio.create_task(self.client.create_version(self.manifest, _taken(self.outbox)))
        for chunk in chunks:
            self.outbox.put_nowait(chunk)

    async def end(self) -> StagedVersion:
        """Ends the upload; returns what the hub has to say."""
        assert self.staging is not None
        self.outbox.put_nowait(None)
        staging, self.staging, self.outbox = self.staging, None, asyncio.Queue()
        return await staging

    async def seal(self) -> None:
        await self.client.seal_version(
            run_id="run", epoch=1, version=self.manifest.version, artifact_id=self.artifact_id
        )


async def _taken(outbox: asyncio.Queue[Chunk | None]) -> AsyncIterator[Chunk]:
    while (chunk := await outbox.get()) is not None:
        yield chunk


async def published(mesh: Mesh, version: int, state: Mapping[str, torch.Tensor]) -> None:
    await mesh.publisher(Transport.STREAM).publish(version, state)
    await mesh.activate(version)


async def begun(mesh: Mesh, engine: MemoryEngine, **more: Any) -> tuple[WeightAgent, Upload]:
    """An engine that serves version 0 and fetches version 1, of which three chunks are at the hub."""
    agent: WeightAgent = mesh.start_agent("e0", engine, **more)
    await published(mesh, 0, make_state(1))
    upload = await Upload.of(mesh, 1, make_state(2))
    upload.send(upload.chunks[:3])
    await mesh.until(lambda: line_of(agent).state is AgentState.FETCHING)
    end = upload.chunks[3].offset
    await mesh.until(lambda: mesh.hub._store.held(upload.artifact_id).here_to(0, end) == end)
    return agent, upload


@pytest.mark.parametrize("backwards", [False, True], ids=["in order", "last chunk first"])
async def test_engine_has_a_version_prepared_when_its_upload_ends(
    mesh: Mesh, engine: MemoryEngine, backwards: bool
) -> None:
    agent = mesh.start_agent("e0", engine)
    await published(mesh, 0, make_state(1))
    upload = await Upload.of(mesh, 1, make_state(2))
    chunks = upload.chunks[::-1] if backwards else upload.chunks
    upload.send(chunks[:5])
    await mesh.until(lambda: line_of(agent).state is AgentState.FETCHING)
    assert mesh.hub.coordinator.line("run").find(1).state is VersionState.STAGING
    upload.send(chunks[5:])
    await mesh.until(lambda: line_of(agent).state is AgentState.PREPARED)  # neither ended nor sealed so far
    assert mesh.hub.coordinator.line("run").find(1).state is VersionState.STAGING
    assert (await upload.end()).missing_offsets == ()
    with pytest.raises(MeshError) as unsealed:
        await mesh.activate(1)
    assert unsealed.value.reason is Reason.VERSION_NOT_SEALED
    assert engine.holds(make_state(1))
    await upload.seal()
    await mesh.activate(1)
    assert engine.holds(make_state(2))
    assert engine.history.count("stage 1") == 1


async def test_broken_upload_that_goes_on_is_followed_on(mesh: Mesh, engine: MemoryEngine) -> None:
    agent, upload = await begun(mesh, engine)
    here, of = upload.chunks[3].offset / 1e6, upload.manifest.payload_bytes / 1e6
    waited_for = f"version 1 from the hub, of which {here:.2f} of {of:.2f} MB are here"
    await mesh.until(lambda: [(wait.what, wait.on) for wait in agent.waits.look(0.0)] == [(waited_for, ("weights",))])
    assert len((await upload.end()).missing_offsets) == len(upload.chunks) - 3
    upload.send(upload.chunks[3:])
    await mesh.until(lambda: line_of(agent).state is AgentState.PREPARED)
    await upload.end()
    await upload.seal()
    await mesh.activate(1)
    assert engine.holds(make_state(2))


async def test_engine_that_gave_up_on_an_upload_prepares_the_version_once_it_is_sealed(
    mesh: Mesh, engine: MemoryEngine
) -> None:
    agent, upload = await begun(mesh, engine, stall_s=2.0)
    await mesh.until(lambda: line_of(agent).state is AgentState.READY)
    await mesh.until(lambda: any(one.last_fault is not None for one in mesh.hub.list_engines("")))
    (info,) = mesh.hub.list_engines("")
    assert (info.last_fault.reason, info.routable) == (Reason.UNREACHABLE.name, True)
    upload.send(upload.chunks[3:])
    await upload.end()
    await upload.seal()
    await mesh.activate(1)
    assert engine.holds(make_state(2))


async def test_version_that_is_aborted_as_it_arrives_is_let_go(mesh: Mesh, engine: MemoryEngine) -> None:
    agent, upload = await begun(mesh, engine)
    follower = asyncio.create_task(_all_of(mesh, upload))
    await mesh.client().abort_version(run_id="run", epoch=1, version=1, message="")
    await mesh.until(lambda: line_of(agent).state is AgentState.READY)
    with pytest.raises(MeshError) as gone:
        await asyncio.wait_for(follower, 60.0)
    assert gone.value.reason is Reason.UNKNOWN_VERSION
    with pytest.raises(MeshError):
        await upload.end()
    await published(mesh, 2, make_state(3))
    assert engine.holds(make_state(3))


async def _all_of(mesh: Mesh, upload: Upload) -> list[Chunk]:
    return [chunk async for chunk in mesh.client().fetch(upload.artifact_id)]


async def test_sealed_version_is_not_given_up_for_one_that_arrives(mesh: Mesh, engine: MemoryEngine) -> None:
    agent = mesh.start_agent("e0", engine)
    await published(mesh, 0, make_state(1))
    await mesh.publisher(Transport.STREAM).publish(1, make_state(2))
    await mesh.until(lambda: line_of(agent).state is AgentState.PREPARED)
    upload = await Upload.of(mesh, 2, make_state(3))
    upload.send(upload.chunks)
    await upload.end()
    assert line_of(agent).target is not None
    assert line_of(agent).target.version == 1
    await mesh.activate(1)
    assert engine.holds(make_state(2))
    await mesh.until(lambda: line_of(agent).state is AgentState.PREPARED)  # now there is room for it
    await upload.seal()
    await mesh.activate(2)
    assert engine.holds(make_state(3))


async def test_hub_that_is_killed_in_an_upload_has_engines_follow_the_rest_of_it(
    mesh: Mesh, engine: MemoryEngine
) -> None:
    _, upload = await begun(mesh, engine)
    await mesh.kill_hub()
    with pytest.raises(MeshError):
        await upload.end()
    await mesh.start_hub()
    await mesh.until_registered()
    upload.client = mesh.client()
    upload.send(upload.chunks[3:])
    await upload.end()
    await upload.seal()
    await mesh.activate(1)
    assert engine.holds(make_state(2))


async def test_versions_of_which_nothing_arrives_cannot_be_fetched(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = await Upload.of(mesh, 0, make_state(1))
    await upload.client.create_version(upload.manifest)
    for call in (_all_of(mesh, upload), upload.client.get_manifest(artifact_id=upload.artifact_id)):
        with pytest.raises(MeshError) as refused:
            await call
        assert refused.value.reason is Reason.VERSION_NOT_SEALED
    monkeypatch.setattr(byte_server, "ARRIVAL_DEADLINE_S", 0.2)
    upload.send(upload.chunks[:1])
    await upload.end()
    with pytest.raises(MeshError, match=r"sent no more of artifact .* for 0.2 s") as stalled:
        await _all_of(mesh, upload)
    assert stalled.value.reason is Reason.UNREACHABLE
