"""OpenGroup over a real hub, and hubs that are killed while a version of a group or of a stream is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import google_crc32c
import pytest

from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest import (
    artifact_id,
    build_manifest,
    digest,
    layout_signature,
)
from meshrl.wire.types import (
    AgentCommand,
    AgentRegistration,
    AgentReport,
    AgentState,
    ApplyReport,
    Chunk,
    ChunkEntry,
    CollectivePlan,
    Commit,
    GroupMember,
    JoinGroup,
    Manifest,
    Prepare,
    TensorEntry,
    Transport,
    VersionState,
)
from weight_mesh import MemoryEngine, Mesh, make_state


def collective_manifest(version: int) -> Manifest:
    tensor = TensorEntry(name="w", dtype="float32", shape=(1,), offset=0, num_bytes=4, digest=bytes((version,)) * 16)
    return build_manifest(
        run_id="run",
        epoch=1,
        version=version,
        transport=Transport.NCCL,
        tensors=(tensor,),
        chunks=(),
        collective=CollectivePlan(num_senders=1, bucket_bytes=64),
    )


class Line:
    """An agent's session, spoken by hand: what the hub commands, and what the test reports."""

    def __init__(self, mesh: Mesh, engine_id: str, ranks: int) -> None:
        self._mesh = mesh
        self.engine_id = engine_id
        self.ranks = ranks
        self.commands: asyncio.Queue[AgentCommand] = asyncio.Queue()
        self._reports: asyncio.Queue[AgentReport] = asyncio.Queue()
        self._last: dict[str, Any] = {"state": AgentState.JOINING}
        self._task: asyncio.Task[None] | None = None
        self._lease_id = ""

    async def dial(self) -> None:
        await self.hang_up()
        client = self._mesh.client()
        lease = await client.register(
            AgentRegistration(
                engine_id=self.engine_id,
                url="http://e",
                transports=tuple(Transport),
                layout_signature=layout_signature([("w", "float32", (1,))]),
                held_version=self._last.get("serving_version"),
                held_root=self._last.get("root", b""),
                collective_ranks=self.ranks,
                collective_backend="gloo",
                host="here",
            )
        )
        self._lease_id = lease.lease_id
        self._reports, self.commands = asyncio.Queue(), asyncio.Queue()
        self.say()
        self._task = asyncio.create_task(self._listen(client))
        engines = self._mesh.hub.coordinator.pool.engines
        await self._mesh.until(lambda: self.engine_id in engines and engines[self.engine_id].connected)

    async def _listen(self, client: Any) -> None:
        async def reports() -> AsyncIterator[AgentReport]:
            while True:
                try:
                    yield await asyncio.wait_for(self._reports.get(), 0.2)
                except TimeoutError:
                    yield self._report()

        try:
            async for command in client.session(reports()):
                self.commands.put_nowait(command)
        except MeshError:  # the hub was killed: the test dials again
            return

    def _report(self, **more: Any) -> AgentReport:
        fields = {key: value for key, value in self._last.items() if key != "root"}
        return AgentReport(lease_id=self._lease_id, **fields, **more)

    def say(self, **changes: Any) -> None:
        applied = changes.pop("applied", None)
        self._last = {key: value for key, value in {**self._last, **changes}.items() if value is not None}
        self._reports.put_nowait(self._report(applied=applied))

    async def told(self) -> AgentCommand:
        return await asyncio.wait_for(self.commands.get(), 60.0)

    def prepared(self, manifest: Manifest) -> None:
        self.say(state=AgentState.PREPARED, target_version=manifest.version, target_artifact_id=artifact_id(manifest))

    def serves(self, manifest: Manifest) -> None:
        root = manifest.result_root
        report = ApplyReport(version=manifest.version, root=root, pause_s=0.1, prepare_s=0.1, requests_kept=0)
        self.say(
            state=AgentState.READY,
            serving_version=manifest.version,
            root=root,
            target_version=None,
            target_artifact_id=None,
            applied=report,
        )

    async def hang_up(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


@pytest.fixture
async def line(mesh: Mesh) -> AsyncIterator[Callable[..., Line]]:
    lines: list[Line] = []

    def make(engine_id: str, ranks: int = 1) -> Line:
        lines.append(Line(mesh, engine_id, ranks))
        return lines[-1]

    yield make
    for made in lines:
        await made.hang_up()


async def open_group(mesh: Mesh, **more: Any) -> Any:
    fields = {"run_id": "run", "epoch": 1, "store_address": "h:1", "backend": "gloo", "num_senders": 2}
    return await mesh.client().open_group(**{**fields, "deadline_s": 30.0, **more})


async def seal(mesh: Mesh, manifest: Manifest) -> str:
    client = mesh.client()
    staged = await client.create_version(manifest)
    assert staged.missing_offsets == ()
    await client.seal_version(run_id="run", epoch=1, version=manifest.version, artifact_id=staged.artifact_id)
    return str(staged.artifact_id)


async def restart(mesh: Mesh, *lines: Line) -> None:
    await mesh.kill_hub()
    await mesh.start_hub()
    for line in lines:
        await line.dial()


async def test_a_group_is_opened_over_the_wire_and_its_engines_are_told(mesh: Mesh, line: Callable[..., Line]) -> None:
    a, b = line("a", 2), line("b", 3)
    with pytest.raises(MeshError, match="no engine is registered") as nobody:
        await open_group(mesh)
    assert nobody.value.reason is Reason.GROUP_BROKEN
    assert nobody.value.retry_after_s == 1.0
    await a.dial()
    await b.dial()
    opened = await open_group(mesh)
    assert opened.generation == 1
    assert opened.members == (
        GroupMember(engine_id="a", first_receiver=0, num_ranks=2),
        GroupMember(engine_id="b", first_receiver=2, num_ranks=3),
    )
    told = await b.told()
    assert isinstance(told, JoinGroup)
    assert (told.generation, told.num_senders, told.num_receivers, told.first_receiver) == (1, 2, 5, 2)
    b.say(group_generation=1)
    await mesh.until(lambda: mesh.hub.list_engines("")[1].group_generation == 1)
    info = (await mesh.client().list_engines())[1]
    assert (info.collective_ranks, info.collective_backend, info.host) == (3, "gloo", "here")
    assert info.transports == tuple(Transport)


async def test_a_version_that_travels_in_a_group_has_no_bytes_at_the_hub(mesh: Mesh) -> None:
    manifest = collective_manifest(0)
    artifact = await seal(mesh, manifest)
    assert await mesh.client().get_manifest(artifact_id=artifact) == (manifest, artifact)
    with pytest.raises(MeshError, match="join the publisher's next group") as caught:
        _ = [chunk async for chunk in mesh.client().fetch(artifact)]
    assert caught.value.reason is Reason.NOT_SUPPORTED
    await mesh.client().abort_version(run_id="run", epoch=1, version=0, message="")
    folder = mesh.folder / "weight_hub" / "artifacts"
    await mesh.until(lambda: list(folder.iterdir()) == [])


async def test_a_hub_killed_in_each_state_of_a_collective_version_goes_on_with_it(
    mesh: Mesh, line: Callable[..., Line]
) -> None:
    a, b = line("a"), line("b")
    await a.dial()
    await b.dial()
    await open_group(mesh)
    for engine in (a, b):
        assert isinstance(await engine.told(), JoinGroup)
        engine.say(group_generation=1)

    manifest = collective_manifest(0)
    await mesh.client().create_version(manifest)
    await restart(mesh, a, b)  # staged
    assert mesh.hub.coordinator.line("run").find(0).state is VersionState.STAGING
    artifact = await seal(mesh, manifest)
    for engine in (a, b):
        assert await engine.told() == Prepare(version=0, artifact_id=artifact, run_id="run", epoch=1)

    await restart(mesh, a, b)  # sealed; the group goes on without the hub
    for engine in (a, b):
        assert await engine.told() == Prepare(version=0, artifact_id=artifact, run_id="run", epoch=1)
        engine.prepared(manifest)
    committing = asyncio.create_task(mesh.activate(0))
    for engine in (a, b):
        assert await engine.told() == Commit(version=0, artifact_id=artifact, run_id="run", epoch=1)

    await restart(mesh, a, b)  # decided, and nobody has applied it
    assert mesh.hub.coordinator.line("run").find(0).state is VersionState.COMMITTING
    for engine in (a, b):
        assert await engine.told() == Commit(version=0, artifact_id=artifact, run_id="run", epoch=1)
        engine.serves(manifest)
    activation = await mesh.activate(0)
    assert activation.version.state is VersionState.COMMITTED
    await asyncio.wait({committing})

    await restart(mesh, a, b)  # committed
    await mesh.until(lambda: [info.routable for info in mesh.hub.list_engines("")] == [True, True])
    assert (await open_group(mesh)).generation == 2


async def test_an_engine_outside_gets_the_copy_that_the_publisher_brings(mesh: Mesh, line: Callable[..., Line]) -> None:
    a, late = line("a"), line("late")
    await a.dial()
    await open_group(mesh)
    await a.told()
    a.say(group_generation=1)
    manifest = collective_manifest(0)
    artifact = await seal(mesh, manifest)
    await a.told()
    await late.dial()
    a.prepared(manifest)
    committing = asyncio.create_task(mesh.activate(0))
    await a.told()
    a.serves(manifest)
    assert [report.engine_id for report in (await committing).engines] == ["a"]
    assert late.commands.empty()

    client, data = mesh.client(), b"copy"
    chunks = (ChunkEntry(offset=0, length=4, digest=digest(data)),)
    copy = replace(manifest, transport=Transport.STREAM, collective=None, chunks=chunks)

    async def pieces() -> AsyncIterator[Chunk]:
        yield Chunk(offset=0, data=data, crc32c=google_crc32c.value(data))

    assert (await client.create_version(copy)).missing_offsets == (0,)
    await restart(mesh, late)  # which loses nothing of it
    client = mesh.client()
    staged = await client.create_version(copy, pieces())
    assert (await client.find_version("run", 0)).steps == ()
    assert late.commands.empty()
    await client.seal_version(run_id="run", epoch=1, version=0, artifact_id=staged.artifact_id)
    assert await late.told() == Commit(version=0, artifact_id=artifact, run_id="run", epoch=1)
    await restart(mesh, late)
    assert await late.told() == Commit(version=0, artifact_id=artifact, run_id="run", epoch=1)
    found = await mesh.client().find_version("run", 0, artifact_id=artifact)
    assert (found.manifest, found.artifact_id, found.steps) == (manifest, artifact, (copy,))
    assert b"".join([bytes(chunk.data) async for chunk in mesh.client().fetch(staged.artifact_id)]) == data
    late.serves(manifest)
    await mesh.until(lambda: [info.routable for info in mesh.hub.list_engines("")] == [True])


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
            await restart(mesh)
        return answer

    publisher.client.create_version = kill_when_staged
    mesh.start_agent("e0", engine)
    report = await publisher.publish(0, make_state(1))
    assert staged.is_set()
    await mesh.until(lambda: engine.shadow is not None)

    await restart(mesh)  # sealed
    assert mesh.hub.coordinator.line("run").find(0).state is VersionState.SEALED
    hang = asyncio.Event()

    async def wait_for_it() -> None:
        await hang.wait()

    engine.before_apply = wait_for_it
    await mesh.until_registered()
    committing = asyncio.create_task(mesh.activate(0))
    await mesh.until(lambda: "pause" in engine.history)

    await restart(mesh)  # decided, and being applied
    assert mesh.hub.coordinator.line("run").find(0).state is VersionState.COMMITTING
    hang.set()
    activation = await client.activate_version(run_id="run", version=0, prepare_deadline_s=30.0)
    await asyncio.wait({committing})
    assert activation.version.state is VersionState.COMMITTED
    assert engine.holds(make_state(1))
    assert engine.root == report.root
    assert engine.history.count("apply 0") == 1
