"""A hub of the older release, which has contract 1.0: a trainer and an engine of today use only what it has."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import older_release
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Transport, VersionKind, VersionProbe
from weight_mesh import MemoryEngine, Mesh, make_state


@pytest.fixture
async def older_mesh(mesh: Mesh, tmp_path: Path) -> AsyncIterator[Mesh]:
    """The mesh with a hub program of the older release in the place of its own."""
    await mesh.kill_hub()
    code, output = tmp_path / "code", tmp_path / "older"
    code.mkdir()
    flags = ("--server.port", str(mesh.port), "--output-dir", str(output), "--max-chunk-bytes", "4096")
    hub = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "meshrl.weights.main", *flags, env=older_release.unpacked(code),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said = asyncio.create_task(hub.stderr.read())  # type: ignore[union-attr]  # it is piped
    try:
        await mesh.client().wait_until_serving(120.0)
        yield mesh
    finally:
        hub.kill()
        print((await said).decode())
        await hub.wait()


@pytest.mark.timeout(180)
async def test_versions_go_through_a_hub_of_1_0_without_what_it_lacks(
    older_mesh: Mesh, engine: MemoryEngine, transport: Transport, warned: list[str]
) -> None:
    changed = {name: tensor.clone() for name, tensor in make_state(1).items()}
    changed["model.norm.weight"][:3] += 1.0
    publisher = older_mesh.publisher(transport, anchor_every=4)
    probe = VersionProbe(token_ids=(1, 2), logprobs=(-1.0,))
    older_mesh.start_agent("e0", engine)
    kinds = []
    for version, weights in enumerate((make_state(1), changed)):
        report = await publisher.publish(version, weights, probe=probe)
        found = await publisher.client.find_version("run", version, artifact_id=report.artifact_id)
        assert found.manifest.probe is None
        kinds.append(found.manifest.kind)
        await publisher.client.activate_version(run_id="run", version=version, prepare_deadline_s=30.0)
        assert engine.holds(weights)
    streamed = transport is Transport.STREAM
    assert kinds == [VersionKind.FULL, VersionKind.DELTA if streamed else VersionKind.FULL]
    assert sum("lacks the capability deltas.files" in line for line in warned) == (0 if streamed else 1)
    assert sum("lacks the capability versions.probes" in line for line in warned) == 1

    manifest = (await older_mesh.publisher(Transport.STREAM).prepare(2, make_state(1))).manifest
    client = older_mesh.client(max_message_bytes=1024)
    await client.list_engines()
    with pytest.raises(MeshError, match=r"lacks the capability manifest\.parts") as refused:
        await client.create_version(manifest)
    assert refused.value.reason is Reason.MESSAGE_TOO_LARGE


READ = """
import sys
import numpy as np
from meshrl.versions.deltas.codec import read_stream
print(sum(piece.changed for piece in read_stream(np.fromfile(sys.argv[1], np.uint8))))
"""


@pytest.mark.timeout(180)
async def test_deltas_have_the_older_format_while_an_engine_of_1_0_is_registered(
    mesh: Mesh, transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    environment = older_release.unpacked(tmp_path / "code")
    publisher, weights = mesh.publisher(transport, anchor_every=8), make_state(1)
    engines = {"today": MemoryEngine(make_state(0))}
    mesh.start_agent("today", engines["today"])
    await mesh.until_registered(1)

    async def format_of(version: int) -> int | None:
        """Publishes a version with few changes, which all engines serve; None for one in full."""
        weights["model.norm.weight"][:3] += 1.0
        report = await publisher.publish(version, weights)
        await mesh.activate(version)
        assert [name for name, engine in engines.items() if not engine.holds(weights)] == []
        held = mesh.hub._store.held(report.artifact_id)
        if held.manifest.kind is VersionKind.FULL:
            return None
        payload = (held.folder / "payload").read_bytes()
        if payload[4] == 1:
            assert await older_release.output_of(environment, READ, str(held.folder / "payload")) == "3\n"
        return payload[4]

    assert [await format_of(version) for version in (0, 1)] == [None, 2]
    engines["older"] = MemoryEngine(make_state(0))
    older = mesh.start_agent("older", engines["older"])
    monkeypatch.setattr(older, "_capabilities", tuple)  # for good: an agent registers anew when they change
    await mesh.until_registered(2)
    listed = {engine.engine_id: engine.capabilities for engine in await publisher.client.list_engines()}
    assert listed == {"today": ("deltas.sparse",), "older": ()}
    assert [await format_of(version) for version in (2, 3, 4)] == [None, 1, 1]  # none of format 2 is below those
    await mesh.kill_agent("older")
    del engines["older"]
    await mesh.until(lambda: len(mesh.hub.coordinator.pool.engines) == 1)
    assert await format_of(5) == 2


async def test_the_hub_of_today_takes_deltas_between_files(mesh: Mesh) -> None:
    publisher = mesh.publisher(Transport.FILESYSTEM, anchor_every=4)
    changed = {name: tensor.clone() for name, tensor in make_state(1).items()}
    changed["model.norm.weight"][:3] += 1.0
    for version, weights in enumerate((make_state(1), changed)):
        await publisher.publish(version, weights)
    found = await publisher.client.find_version("run", 1, artifact_id="")
    assert found.manifest.kind is VersionKind.DELTA
