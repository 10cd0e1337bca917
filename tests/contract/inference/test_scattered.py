"""A version in parts: from ranks that shard it by FSDP2 to the workers of a vLLM that divides it by tensor parallelism.

Real programs throughout, over gloo. The workers keep weights unpacked (see `plain_weights_engine`), as on a GPU.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import forked_ranks
import plain_weights_engine
import publishing_ranks
from engine_mesh import SOURCES, EngineClient, EngineMesh, reference
from meshrl.client import WeightSyncClient
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Transport
from plain_checks import check_greedy
from plain_model import logits_of, plain_state
from state_publisher import StatePublisher

LEASE_S = 60.0  # two processes of an engine and the ranks on a machine that may have two cores
PROMPT, TOKENS = [1, 2, 3], 10
WORKERS = 2
EPOCHS = itertools.count(1)
LARGEST_PART_BYTES = 4 * 128 * 64 // 2  # half of `up_proj`, in float32


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("received")


@pytest.fixture(scope="module")
def divided(start_mesh: Callable[..., EngineMesh], received: Path) -> EngineMesh:
    with pytest.MonkeyPatch.context() as patch:
        for folder in (plain_weights_engine.RECEIVED, plain_weights_engine.LIVE):
            patch.setenv(folder, str(received))
        patch.setenv("PYTHONPATH", str(Path(plain_weights_engine.__file__).parent))
        return start_mesh(
            "vllm", module="plain_weights_engine", vllm={"tensor_parallel_size": WORKERS}, lease_s=LEASE_S
        )


class Trainer:
    """The ranks of `publishing_ranks`, at the next version of a mesh."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def publish(self, seed: int) -> dict[str, Any]:
        lead = self.process
        assert lead.stdin is not None
        assert lead.stdout is not None
        lead.stdin.write(f"{seed}\n".encode())
        await lead.stdin.drain()
        answer: dict[str, Any] = json.loads(await asyncio.wait_for(lead.stdout.readline(), 180.0))
        return answer


@asynccontextmanager
async def trainer(mesh: EngineMesh, epoch: int, num_ranks: int, *die_at: str) -> AsyncIterator[Trainer]:
    support = str(Path(publishing_ranks.__file__).parent)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((*SOURCES, support))}
    with (mesh.folder / f"trainer-{epoch}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, forked_ranks.__file__, str(num_ranks), publishing_ranks.__file__,
            str(epoch), str(mesh.version + 1), mesh.hub_address, "1", mesh.kind.dtype_name, *die_at,
            env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    try:
        yield Trainer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def serve(mesh: EngineMesh, version: int, seed: int) -> None:
    mesh.version = version
    await mesh.activate(seed)
    await serve_still(mesh)


async def serve_still(mesh: EngineMesh) -> None:
    """Checks that the engine serves the mesh's version, and computes with it."""
    async with mesh.session() as session:
        choice = await EngineClient(session).greedy(PROMPT, TOKENS)
    assert choice["version_spans"] == [[0, TOKENS, mesh.version]]
    check_greedy(mesh.kind, logits_of(reference(mesh), PROMPT, choice["token_ids"]), choice)


def live(received: Path, version: int) -> list[dict[str, torch.Tensor]]:
    return [load_file(received / f"{version}-{rank}.safetensors") for rank in range(WORKERS)]


def parts_of(received: Path, version: int) -> list[dict[str, int]]:
    notes = [json.loads(line) for path in received.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [note for note in notes if note["version"] == version]


async def by_hub(mesh: EngineMesh, epoch: int, seed: int, transport: Transport) -> None:
    """Has a version loaded by vLLM itself, of whole tensors."""
    async with WeightSyncClient(mesh.hub_address) as client:
        publisher = StatePublisher(client, transport, mesh.folder / "broadcasts", epoch=epoch)
        await publisher.publish(mesh.version + 1, plain_state(seed, mesh.kind.dtype))
        await publisher.close()
    await serve(mesh, mesh.version + 1, seed)


async def lose_a_rank(mesh: EngineMesh, ranks: Trainer) -> None:
    """Rank 1 is killed in the midst of the next version, which is refused and tears nothing."""
    publishing = asyncio.create_task(ranks.publish(1))
    await mesh.until(lambda engine: engine.last_fault is not None)
    async with WeightSyncClient(mesh.hub_address) as hub:
        with pytest.raises(MeshError) as refused:
            await hub.activate_version(run_id="run", version=mesh.version + 1, prepare_deadline_s=3.0)
    assert refused.value.reason is Reason.ENGINES_NOT_READY
    assert refused.value.metadata == {mesh.url.removeprefix("http://"): Reason.GROUP_BROKEN.name}
    await serve_still(mesh)
    mesh.version += 1
    publishing.cancel()


@pytest.mark.parametrize("num_ranks", [2, 4])
async def test_each_worker_gets_its_parts_and_is_to_the_bit_what_vllm_loads_of_whole_tensors(
    divided: EngineMesh, received: Path, num_ranks: int
) -> None:
    """The two ranks end with one killed; what comes after, from vLLM's files and from four, lands as before."""
    mesh, is_new = divided, divided.version < 0
    death = [str(mesh.version + 4)] if num_ranks == 2 else []
    async with trainer(mesh, next(EPOCHS), num_ranks, *death) as ranks:
        for turn, seed in enumerate((0, 1, 0)):
            sent = await ranks.publish(seed)
            await serve(mesh, sent["version"], seed)
            assert sent["rows"] == sent["bytes"] // num_ranks
            parts = parts_of(received, mesh.version)
            assert len(parts) == WORKERS
            if turn == 0 and is_new:  # no worker knew where vLLM puts a tensor
                assert not sent["scatters"]
                assert all(part["received"] == sent["bytes"] for part in parts)
                continue
            assert sent["scatters"]
            for part in parts:
                assert 0.5 * sent["bytes"] <= part["received"] < 0.52 * sent["bytes"]  # norms are whole
                assert part["largest"] <= LARGEST_PART_BYTES
        scattered = mesh.version
        if death:
            await lose_a_rank(mesh, ranks)
    epoch = next(EPOCHS)
    await by_hub(mesh, epoch, 1, Transport.STREAM)
    await by_hub(mesh, epoch, 0, Transport.FILESYSTEM)
    for ours, loaded in zip(live(received, scattered), live(received, mesh.version), strict=True):
        assert ours.keys() == loaded.keys()
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in ours.items())
