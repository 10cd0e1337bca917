"""What engines compile, at a real hub: kept by key, given to others, refused where it is damaged."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from loguru import logger

from meshrl.client.authority import Authority
from meshrl.client.credentials import CredentialFiles, credentials_of
from meshrl.client.trust import Role
from meshrl.core.config.shared import WeightBroadcastConfig
from meshrl.inference import compiled
from meshrl.inference.compiled import CompiledFolder, bring, share
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.compiled import MOST_KEPT
from meshrl.wire.errors import MeshError, Reason
from weight_mesh import Mesh

KEY = "b" * 64


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CompiledFolder, CompiledFolder]:
    """The folders of two hosts, whose hub has shown a certificate."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", "")
    monkeypatch.setattr(compiled, "_hub_is_known", lambda: True)
    folders = CompiledFolder(KEY, tmp_path / "first"), CompiledFolder(KEY, tmp_path / "second")
    for folder in folders:
        folder.open()
    (tmp_path / "first" / KEY / "graph.py").write_bytes(b"def call(): ...")
    return folders


async def logged(folder: CompiledFolder, way: WeightBroadcastConfig) -> list[str]:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}", filter=compiled.__name__)
    await bring(folder, way)
    logger.remove(sink)
    return lines


async def test_engine_starts_with_what_another_has_compiled(
    mesh: Mesh, hosts: tuple[CompiledFolder, CompiledFolder], tmp_path: Path
) -> None:
    first, second = hosts
    way = WeightBroadcastConfig(address=f"127.0.0.1:{mesh.port}")
    assert await logged(second, way) == []  # nothing is there yet
    await share(first, way)
    [line] = await logged(second, way)
    assert line.startswith("what this engine would compile came from the hub: ")
    assert (tmp_path / "second" / KEY / "graph.py").read_bytes() == b"def call(): ..."
    assert await logged(second, way) == []  # it has its own now


async def test_damaged_archive_is_one_line_and_a_cold_start(
    mesh: Mesh, hosts: tuple[CompiledFolder, CompiledFolder]
) -> None:
    client = mesh.client()
    await client.keep_compiled(KEY, lambda: asyncio.sleep(0, b"no archive"))
    [line] = await logged(hosts[1], WeightBroadcastConfig(address=f"127.0.0.1:{mesh.port}"))
    assert line.startswith("this engine compiles by itself: ")
    assert hosts[1].is_empty


async def test_hub_without_a_certificate_is_neither_asked_nor_given_anything(
    mesh: Mesh, hosts: tuple[CompiledFolder, CompiledFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    way = WeightBroadcastConfig(address=f"127.0.0.1:{mesh.port}")
    monkeypatch.undo()
    for name in ("MESHRL_TLS_CA", "MESHRL_TLS_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    await share(hosts[0], way)
    assert await mesh.client().get_compiled(KEY) == b""
    await mesh.client().keep_compiled(KEY, lambda: asyncio.to_thread(hosts[0].pack))
    assert await logged(hosts[1], way) == []
    assert hosts[1].is_empty


async def test_engines_share_over_tls_with_a_hub_of_their_run_and_with_no_other(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is replaced here: certificates of the run's authority at both ends, as `share_compiled` wants them."""
    run, other = (Authority.create(tmp_path / name / "credentials", name) for name in ("run", "other"))

    def member(authority: Authority, role: Role, name: str) -> Path:
        authority.issue(authority.folder / name, role, name)
        return authority.folder / name

    def opened(name: str) -> CompiledFolder:
        folder = CompiledFolder(KEY, tmp_path / name)
        folder.open()
        return folder

    async def serve(authority: Authority) -> None:
        await mesh.kill_hub()
        files = CredentialFiles.of_folder(member(authority, Role.HUB, "hub"))
        mesh.credentials = credentials_of(replace(files, trust=authority.trust.path))
        await mesh.start_hub()

    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # what `open` sets is taken back after the test
    monkeypatch.setenv("MESHRL_TLS_FOLDER", str(member(run, Role.AGENT, "first")))
    way = WeightBroadcastConfig(address=f"127.0.0.1:{mesh.port}")
    first = opened("one host")
    (tmp_path / "one host" / KEY / "graph.py").write_bytes(b"def call(): ...")
    await serve(run)
    await share(first, way)
    monkeypatch.setenv("MESHRL_TLS_FOLDER", str(member(run, Role.AGENT, "second")))
    [line] = await logged(opened("another host"), way)
    assert line.startswith("what this engine would compile came from the hub: ")
    assert (tmp_path / "another host" / KEY / "graph.py").read_bytes() == b"def call(): ..."
    await serve(other)
    assert (mesh.hub.compiled._folder / KEY).exists()
    left_alone = opened("a third host")
    [line] = await logged(left_alone, way)
    assert line.startswith("this engine compiles by itself: UNREACHABLE: ")
    assert left_alone.is_empty


async def test_hub_checks_digests_finds_damage_and_keeps_the_newest_keys(mesh: Mesh) -> None:
    client, store = mesh.client(), mesh.hub.compiled
    request = pb.KeepCompiledRequest(key=KEY, digest=bytes(32), archive=b"sent")
    with pytest.raises(MeshError) as refused:
        await client._unary(client._stub.KeepCompiled, "KeepCompiled", request)
    assert refused.value.reason is Reason.DIGEST_MISMATCH
    assert await client.get_compiled(KEY) == b""
    for number in range(MOST_KEPT + 1):
        await client.keep_compiled(f"{number:064x}", lambda: asyncio.sleep(0, b"archive"))
    assert await client.get_compiled(f"{0:064x}") == b""
    assert await client.get_compiled(f"{1:064x}") == b"archive"
    at_rest = store._folder / f"{1:064x}"
    at_rest.write_bytes(at_rest.read_bytes()[:-1] + b"!")
    assert await client.get_compiled(f"{1:064x}") == b""
    with pytest.raises(MeshError) as refused:
        await client.get_compiled("../decisions.sqlite")
    assert refused.value.reason is Reason.INVALID_REQUEST
