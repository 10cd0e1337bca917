"""Large versions go to and from a hub nearby as raw bytes over HTTP; whatever fails there goes over gRPC."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opentelemetry import trace

from local_ports import free_port
from meshrl.client import ChannelOptions, WeightSyncClient
from meshrl.client.authority import Authority
from meshrl.client.credentials import CredentialFiles, TokenCredentials, credentials_of
from meshrl.client.trust import Role
from meshrl.core.config import ConfigError
from meshrl.core.config.shared import ServerConfig
from meshrl.versions import raw_bytes
from meshrl.versions.downloads import Downloader
from meshrl.versions.sources import LinkLimits
from meshrl.versions.uploads import Uploader
from meshrl.versions.version_bytes import VersionBytes
from meshrl.weights import raw_server
from meshrl.weights.config import WeightsConfig
from meshrl.weights.main import serve
from meshrl.weights.relay import Relay
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.frames import parse_fetch
from meshrl.wire.types import Chunk, Manifest, Transport
from polling import until
from state_publisher import StatePublisher
from unnamed_files import unnamed_files
from weight_mesh import MemoryEngine, Mesh, make_state

State = Mapping[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_versions_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_bytes, "FROM_BYTES", 1)
    monkeypatch.setattr(raw_bytes, "RUN_BYTES", 3 * 4096)
    monkeypatch.setattr(raw_bytes, "SILENT_S", 2.0)


@pytest.fixture
def over_grpc(monkeypatch: pytest.MonkeyPatch) -> list[Chunk]:
    """The chunks that came to the hub in messages, or were fetched so."""
    chunks: list[Chunk] = []
    write = VersionBytes.write

    def written(held: VersionBytes, chunk: Chunk) -> None:
        chunks.append(chunk)
        write(held, chunk)

    monkeypatch.setattr(VersionBytes, "write", written)
    return chunks


async def staged(mesh: Mesh, version: int = 0, state: State | None = None) -> tuple[Manifest, bytes, str]:
    """A version whose manifest alone is at the hub."""
    prepared = await mesh.publisher(Transport.STREAM).prepare(version, state or make_state(1))
    answer = await mesh.client().create_version(prepared.manifest)
    return prepared.manifest, prepared.buffer.tobytes(), answer.artifact_id


def asked(mesh: Mesh, method: str, path: str, **more: Any) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", mesh.raw.port, timeout=10.0)
    try:
        connection.request(method, path, **more)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


async def fetched(mesh: Mesh, manifest: Manifest, artifact_id: str, client: WeightSyncClient | None = None) -> bytes:
    client = client or mesh.client()
    await client.find_version(artifact_id=artifact_id)
    memory = np.zeros(manifest.payload_bytes, dtype=np.uint8)
    downloader = Downloader(client, LinkLimits(stall_s=10.0))
    try:
        await downloader.pull(VersionBytes(manifest, memory=memory), artifact_id)
    finally:
        await downloader.close()
    return memory.tobytes()


async def test_a_version_goes_to_an_engine_without_a_chunk_over_grpc(
    mesh: Mesh, engine: MemoryEngine, over_grpc: list[Chunk]
) -> None:
    agent = mesh.start_agent("e0", engine)
    for version in range(3):
        await mesh.publisher(Transport.STREAM).publish(version, make_state(version + 1))
        await mesh.activate(version)
        assert engine.holds(make_state(version + 1))
    assert over_grpc == []
    assert agent.downloader.taken_bytes == 3 * sum(tensor.nbytes for tensor in make_state(0).values())


async def test_an_engine_of_other_processes_gets_them_into_its_file(
    mesh: Mesh, engine: MemoryEngine, over_grpc: list[Chunk], tmp_path: Path
) -> None:
    engine.stages_from_files = True
    mesh.start_agent("e0", engine, spool_dir=tmp_path)
    for version in range(4):
        await mesh.publisher(Transport.STREAM).publish(version, make_state(version + 1))
        await mesh.activate(version)
        assert engine.holds(make_state(version + 1))
        kept = 1 if version > 0 else 0
        await until(lambda kept=kept: len(unnamed_files(tmp_path)) == kept)
    assert over_grpc == []


async def test_a_relay_gets_raw_bytes_from_its_hub_and_serves_messages(
    mesh: Mesh, over_grpc: list[Chunk], tmp_path: Path
) -> None:
    report = await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    relay = Relay(mesh.client(), LinkLimits(), spool_dir=tmp_path / "relay", max_chunk_bytes=2**20, keep_versions=2)
    await relay.start()
    try:
        messages = [parse_fetch(message) async for message in relay.fetch(report.artifact_id, (), 0)]
        whole = b"".join(bytes(message.data) for message in messages)
    finally:
        await relay.stop()
    manifest, _ = await mesh.client().get_manifest(artifact_id=report.artifact_id)
    assert whole == await fetched(mesh, manifest, report.artifact_id)
    assert over_grpc == []


async def test_a_fetch_follows_an_upload(mesh: Mesh, over_grpc: list[Chunk]) -> None:
    manifest, payload, artifact = await staged(mesh)
    half = manifest.chunks[5].offset

    def put(start: int, end: int) -> int:
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(payload)}"}
        return asked(mesh, "PUT", f"/artifacts/{artifact}", body=payload[start:end], headers=headers)[0]

    assert await asyncio.to_thread(put, 0, half) == 204
    fetching = asyncio.create_task(fetched(mesh, manifest, artifact))
    await asyncio.sleep(0.3)
    assert not fetching.done()
    assert await asyncio.to_thread(put, half, len(payload)) == 204
    assert await fetching == payload
    assert over_grpc == []


async def test_the_rest_comes_over_grpc_when_raw_connections_break(
    mesh: Mesh, over_grpc: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    send, calls = VersionBytes.send, []

    def broken(held: VersionBytes, connection: Any, offset: int, end: int) -> None:
        calls.append(offset)
        if len(calls) > 2:
            end = (offset + end) // 2
        send(held, connection, offset, end)
        if len(calls) > 2:
            raise OSError("the disk is gone")

    report = await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    monkeypatch.setattr(VersionBytes, "send", broken)
    manifest, _ = await mesh.client().get_manifest(artifact_id=report.artifact_id)
    whole = await fetched(mesh, manifest, report.artifact_id)
    assert 0 < len(over_grpc) < len(manifest.chunks)
    monkeypatch.setattr(raw_bytes, "FROM_BYTES", 2**40)
    assert whole == await fetched(mesh, manifest, report.artifact_id)


async def test_a_hub_that_cannot_be_reached_for_raw_bytes_gets_and_sends_all_over_grpc(
    mesh: Mesh, engine: MemoryEngine, over_grpc: list[Chunk]
) -> None:
    await mesh.raw.stop()
    mesh.start_agent("e0", engine)
    await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    await mesh.activate(0)
    assert engine.holds(make_state(1))
    assert len(over_grpc) >= 11


async def test_an_upload_whose_bytes_have_changed_is_refused_as_over_grpc(mesh: Mesh) -> None:
    publisher = mesh.publisher(Transport.STREAM, retry_for_s=0.5)
    prepared = await publisher.prepare(0, make_state(1))
    changed = prepared.buffer.copy()
    changed[-1] ^= 1
    with pytest.raises(MeshError) as refused:
        await Uploader(mesh.client(), publisher.progress, retry_for_s=0.5).stage(prepared.manifest, changed)
    assert refused.value.reason is Reason.DIGEST_MISMATCH


async def test_requests_without_a_valid_path_or_range_are_refused(mesh: Mesh) -> None:
    report = await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    manifest, _ = await mesh.client().get_manifest(artifact_id=report.artifact_id)
    path, first = f"/artifacts/{report.artifact_id}", {"Range": "bytes=0-9"}

    async def get(path: str = path, headers: Mapping[str, str] = first) -> int:
        return (await asyncio.to_thread(asked, mesh, "GET", path, headers=headers))[0]

    assert await get() == 206
    outside = f"bytes=0-{manifest.payload_bytes}"
    for headers in ({}, {"Range": "bytes=9-0"}, {"Range": "bytes=-5"}, {"Range": outside}, {"Range": "items=0-9"}):
        assert await get(headers=headers) == 409, headers
    for other in ("/", "/artifacts/../x", f"/artifacts/{'0' * 64}", f"{path}/"):
        assert await get(other) == 409, other
    part = {"Content-Range": "bytes 1-9/100"}
    status, text = await asyncio.to_thread(asked, mesh, "PUT", path, body=b"x" * 9, headers=part)
    assert status == 409
    assert b"awaited" in text  # the version is sealed


async def test_an_upload_takes_whole_chunks_alone(mesh: Mesh) -> None:
    manifest, payload, artifact = await staged(mesh)
    path = f"/artifacts/{artifact}"
    size, chunk = len(payload), manifest.chunks[0].length
    for start, end in ((0, chunk - 1), (1, chunk), (0, chunk + 1), (chunk // 2, chunk)):
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{size}"}
        body = payload[start:end]
        status, text = await asyncio.to_thread(asked, mesh, "PUT", path, body=body, headers=headers)
        assert status == 409
        assert b"not made of chunks" in text
    headers = {"Content-Range": f"bytes 0-{chunk - 1}/{size}"}
    wrong = bytes(chunk)
    status, text = await asyncio.to_thread(asked, mesh, "PUT", path, body=wrong, headers=headers)
    assert (status, b"DIGEST_MISMATCH" in text) == (409, True)
    assert len((await mesh.client().create_version(manifest)).missing_offsets) == len(manifest.chunks)


async def test_a_cancelled_fetch_leaves_no_thread_that_writes(mesh: Mesh) -> None:
    manifest, payload, artifact = await staged(mesh)
    half = manifest.chunks[2].offset
    headers = {"Content-Range": f"bytes 0-{half - 1}/{len(payload)}"}
    await asyncio.to_thread(asked, mesh, "PUT", f"/artifacts/{artifact}", body=payload[:half], headers=headers)
    fetching = asyncio.create_task(fetched(mesh, manifest, artifact))
    await until(lambda: any(thread.name.startswith("raw_") for thread in threading.enumerate()))
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    await until(lambda: not any(thread.name.startswith("raw_") for thread in threading.enumerate()))


async def test_a_hub_far_away_is_asked_over_grpc(
    mesh: Mesh, over_grpc: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    manifest, _ = await mesh.client().get_manifest(artifact_id=report.artifact_id)
    monkeypatch.setattr(raw_bytes, "is_of_this_machine", lambda address: False)
    monkeypatch.setattr(raw_bytes, "FAR_S", -1.0)
    await fetched(mesh, manifest, report.artifact_id)
    assert len(over_grpc) == len(manifest.chunks)


async def test_a_silent_peer_is_not_waited_for(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_server, "SILENT_S", 0.3)
    before = threading.active_count()
    _, writer = await asyncio.open_connection("127.0.0.1", mesh.raw.port)
    await until(lambda: threading.active_count() > before)
    await until(lambda: threading.active_count() <= before)
    writer.close()


async def test_a_caller_with_credentials_does_not_leave_them_out(mesh: Mesh, over_grpc: list[Chunk]) -> None:
    report = await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    client = mesh.client(credentials=TokenCredentials("id.secret"))
    manifest, _ = await client.get_manifest(artifact_id=report.artifact_id)
    await fetched(mesh, manifest, report.artifact_id, client)
    assert len(over_grpc) == len(manifest.chunks)
    prepared = await mesh.publisher(Transport.STREAM).prepare(1, make_state(2))
    assert (await client.create_version(prepared.manifest)).raw_port == 0


@pytest.mark.parametrize(
    ("raw_port", "encrypted", "offered"),
    [(0, False, True), (None, False, False), (0, True, False)],
    ids=["by default", "raw_port None", "with TLS"],
)
async def test_the_program_offers_raw_bytes(
    raw_port: int | None, encrypted: bool, offered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, options = free_port(), ChannelOptions()
    if encrypted:
        authority = Authority.create(tmp_path / "run" / "credentials", "run")
        files = {}
        for role in (Role.HUB, Role.PUBLISHER):
            authority.issue(tmp_path / role, role, role)
            files[role] = replace(CredentialFiles.of_folder(tmp_path / role), trust=authority.trust.path)
        for variable, path in files[Role.HUB].variables().items():
            monkeypatch.setenv(variable, path)
        options = ChannelOptions(credentials=credentials_of(files[Role.PUBLISHER]))
    config = WeightsConfig(output_dir=tmp_path, server=ServerConfig(port=port), raw_port=raw_port)
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(config, stop, trace.get_tracer("test")))
    async with WeightSyncClient(f"127.0.0.1:{port}", options) as client:
        await client.wait_until_serving(20.0)
        publisher = StatePublisher(client, Transport.STREAM, tmp_path / "broadcasts", epoch=1, num_threads=1)
        report = await publisher.publish(0, make_state(1))
        staged = await client.create_version((await publisher.prepare(1, make_state(2))).manifest)
        await client.get_manifest(artifact_id=report.artifact_id)
        assert [staged.raw_port > 0, client.raw_port > 0] == [offered, offered]
    stop.set()
    assert await serving == 0


async def test_a_port_in_use_is_an_error_that_names_the_key(mesh: Mesh, tmp_path: Path) -> None:
    config = WeightsConfig(output_dir=tmp_path / "other", server=ServerConfig(port=free_port()), raw_port=mesh.raw.port)
    with pytest.raises(ConfigError, match="set another raw_port, or 0 for a free one"):
        await serve(config, asyncio.Event(), trace.get_tracer("test"))
