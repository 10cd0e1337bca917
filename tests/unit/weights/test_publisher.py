"""What a publisher writes before the hub sees anything, and the epoch of a trainer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from meshrl.client import WeightSyncClient
from meshrl.client.weights import while_moving
from meshrl.core.config import ConfigError
from meshrl.trainer.publishing.publisher import next_epoch
from meshrl.versions.files import HostBytes
from meshrl.versions.progress import Progress
from meshrl.versions.uploads import Attempts, Uploader
from meshrl.wire import frames, manifest_checks
from meshrl.wire import manifest as manifests
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.manifest_file import from_json, manifest_path
from meshrl.wire.types import EngineInfo, StagedVersion, TensorEntry, Transport, capabilities
from state_publisher import StatePublisher
from virtual_time import run_at_once


class FirstHub(WeightSyncClient):
    """Answers a publisher as a hub does that takes everything."""

    def __init__(self) -> None:
        self.address, self.capabilities = "127.0.0.1:1", frozenset(capabilities.HUB)
        self.manifest: Any = None
        self.received: dict[int, bytes] = {}

    async def list_engines(self, engine_pool: str = "") -> tuple[EngineInfo, ...]:
        return ()

    async def create_version(self, manifest: Any, chunks: Any = None, *, stall_s: float | None = None) -> Any:
        self.manifest = manifest
        if chunks is not None:
            async for message in chunks:
                chunk = frames.parse_upload(message)
                self.received[chunk.offset] = bytes(chunk.data)
        return StagedVersion(artifact_id=manifests.artifact_id(manifest), missing_offsets=(), max_chunk_bytes=2**22)

    async def seal_version(self, **fields: Any) -> Any:
        self.sealed = fields


STATE = {
    "b": torch.randn(50, 40),
    "a": torch.randn(9, dtype=torch.bfloat16),
    "n": torch.tensor(3),
    "t": torch.ones(4, 3).T,
}


def publisher(hub: WeightSyncClient, transport: Transport, folder: Path, **more: Any) -> StatePublisher:
    return StatePublisher(hub, transport, folder, run_id="r", epoch=2, **more)


async def test_files_are_safetensors_with_the_manifest_beside_them(tmp_path: Path) -> None:
    hub = FirstHub()
    report = await publisher(hub, Transport.FILESYSTEM, tmp_path).publish(7, STATE)
    payload = tmp_path / "step_7" / "weights-e2.safetensors"
    assert sorted(path.name for path in payload.parent.iterdir()) == ["weights-e2.json", "weights-e2.safetensors"]
    loaded = load_file(payload)
    assert all(torch.equal(loaded[name], STATE[name]) for name in STATE)
    assert from_json(manifest_path(payload).read_bytes()) == hub.manifest
    assert manifest_checks.violations(hub.manifest, max_chunk_bytes=4096) == []
    assert (report.num_bytes, report.root) == (50 * 40 * 4 + 18 + 8 + 48, hub.manifest.result_root)


async def test_both_transports_give_the_same_root(tmp_path: Path) -> None:
    hub = FirstHub()
    files = await publisher(hub, Transport.FILESYSTEM, tmp_path).publish(0, STATE)
    stream = await publisher(hub, Transport.STREAM, tmp_path).publish(0, STATE)
    assert files.root == stream.root
    whole = np.frombuffer(bytearray(b"".join(hub.received[offset] for offset in sorted(hub.received))), dtype=np.uint8)
    held = HostBytes(parts=((0, whole),))
    assert held.wrong_tensor(hub.manifest, threading.Event()) is None
    whole[-1] ^= 1
    assert held.wrong_tensor(hub.manifest, threading.Event()) == "a"


async def test_sealing_has_time_for_all_the_bytes_that_the_hub_must_hash() -> None:
    hub = FirstHub()
    large = TensorEntry(name="w", dtype="uint8", shape=(65 * 10**9,), offset=0, num_bytes=65 * 10**9, digest=b"")
    manifest = manifests.build_manifest(
        run_id="r", epoch=1, version=1, transport=Transport.FILESYSTEM, tensors=(large,), chunks=()
    )
    progress = Progress()
    left_s = []
    seal = hub.seal_version

    async def watched(**named: object) -> object:
        left_s.append(progress.left_s(600.0))
        return await seal(**named)

    hub.seal_version = watched
    await Uploader(hub, progress).seal(manifest, "a", "")
    assert left_s[0] > 65e9 / 100e6 + 600.0  # meanwhile nothing can be seen of it
    assert progress.left_s(600.0) <= 600.0
    assert hub.sealed["deadline_s"] > 65e9 / 100e6  # a hub that hashes 100 MB/s


def run_attempts(left: Sequence[int | None], length_s: float, stall_s: float) -> int:
    """How many of these attempts there are when each takes `length_s` and leaves so much."""

    async def run() -> int:
        attempts = Attempts(stall_s, left=100)
        for count, after in enumerate(left, 1):
            await asyncio.sleep(length_s)
            try:
                await attempts.another(MeshError(Reason.UNREACHABLE), left=after)
            except MeshError:
                return count
        return len(left)

    return run_at_once(run())


def test_a_transfer_ends_when_no_attempt_brings_it_further_however_long_it_took() -> None:
    assert run_attempts([90, 80, 70], 0.6, 0.5) == 3
    assert run_attempts([90, None, 80, 80], 0.6, 0.5) == 4
    assert run_attempts([None, None], 0.6, 0.5) == 2  # nobody knows whether the second one did
    assert run_attempts([100, 100], 0.6, 0.5) == 1
    assert run_attempts([99, 100, 100], 0.6, 0.5) == 2


def test_an_upload_goes_on_within_half_a_second_of_the_hubs_return() -> None:
    async def waits() -> list[float]:
        attempts, loop = Attempts(60.0, left=100), asyncio.get_running_loop()
        ended = [loop.time()]
        for _ in range(10):
            await attempts.another(MeshError(Reason.UNREACHABLE), left=100)
            ended.append(loop.time())
        return [after - before for before, after in pairwise(ended)]

    assert max(run_at_once(waits())) <= 0.5


def test_epoch_grows_with_every_start(tmp_path: Path) -> None:
    path = tmp_path / "run" / "trainer_epoch"
    assert [next_epoch(path) for _ in range(3)] == [1, 2, 3]
    for damaged in (b"", b"many", b"\xff"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"trainer_epoch should hold how often .* write a number"):
            next_epoch(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"trainer_epoch cannot be used: .*directory"):
        next_epoch(path)


async def test_chunk_that_leaves_in_the_moment_of_giving_up_is_no_defect() -> None:
    async def give_up() -> None:
        async with while_moving(0.01, "a version") as moves:
            try:
                await asyncio.Event().wait()
            finally:  # as the generator of an upload may, which runs in a task of its own
                moves()

    with pytest.raises(MeshError) as caught:
        await give_up()
    assert caught.value.reason is Reason.UNREACHABLE
