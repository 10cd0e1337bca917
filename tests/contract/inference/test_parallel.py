"""vLLM on several processes, which take versions whichever way they come, stay in step, and end together.

Workers of tensor parallelism get parts of versions from ranks that shard them by FSDP2; they keep weights unpacked (see
`plain_weights_engine`), as on a GPU. Such that pack them are in `test_mixture`. Real programs throughout, over gloo.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
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
from group_senders import GroupSenders, Parcel
from meshrl.client import WeightSyncClient
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AgentState, Transport
from plain_checks import check_greedy
from plain_model import logits_of, plain_state

LEASE_S = 60.0  # two processes of an engine and the ranks on a machine that may have two cores
PROMPTS = ([1, 2, 3], [1 + index % 63 for index in range(400)])
TOKENS = 10  # of each; processes that wait for each other take their time for one
REQUESTS = 4  # of each prompt, so that each data-parallel part gets some
GROUPS = 3
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
        return start_mesh(
            "vllm", module="plain_weights_engine", vllm={"tensor_parallel_size": WORKERS}, lease_s=LEASE_S
        )


@pytest.fixture(scope="module")
def data_parallel(start_mesh: Callable[..., EngineMesh]) -> EngineMesh:
    return start_mesh("vllm", module="patient_workers", vllm={"data_parallel_size": WORKERS}, lease_s=LEASE_S)


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
async def trainer(mesh: EngineMesh, num_ranks: int, *die_at: str) -> AsyncIterator[Trainer]:
    mesh.epoch = next(EPOCHS)
    support = str(Path(publishing_ranks.__file__).parent)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((*SOURCES, support))}
    with (mesh.folder / f"trainer-{mesh.epoch}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, forked_ranks.__file__, str(num_ranks), publishing_ranks.__file__,
            str(mesh.epoch), str(mesh.version + 1), mesh.hub_address, "1", mesh.kind.dtype_name, *die_at,
            env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    try:
        yield Trainer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def check_served(mesh: EngineMesh, prompts: Sequence[list[int]] = PROMPTS[:1]) -> None:
    """The engine serves the mesh's version, and computes with it."""
    async with mesh.session() as session:
        client = EngineClient(session)
        for prompt in prompts:
            for choice in await asyncio.gather(*(client.greedy(prompt, TOKENS) for _ in range(REQUESTS))):
                assert choice["version_spans"] == [[0, TOKENS, mesh.version]]
                check_greedy(mesh.kind, logits_of(reference(mesh), prompt, choice["token_ids"]), choice)


def live(received: Path, version: int) -> list[dict[str, torch.Tensor]]:
    return [load_file(received / f"{version}-{rank}.safetensors") for rank in range(WORKERS)]


def parts_of(received: Path, version: int) -> list[dict[str, int]]:
    notes = [json.loads(line) for path in received.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [note for note in notes if note["version"] == version]


async def lose_a_rank(mesh: EngineMesh, ranks: Trainer) -> None:
    """Rank 1 is killed in the midst of the next version, which is refused and tears nothing."""
    publishing = asyncio.create_task(ranks.publish(1))
    await mesh.until(lambda engine: engine.last_fault is not None)
    async with WeightSyncClient(mesh.hub_address) as hub:
        with pytest.raises(MeshError) as refused:
            await hub.activate_version(run_id="run", version=mesh.version + 1, prepare_deadline_s=3.0)
    assert refused.value.reason is Reason.ENGINES_NOT_READY
    assert refused.value.metadata == {mesh.url.removeprefix("http://"): Reason.GROUP_BROKEN.name}
    await check_served(mesh)
    mesh.version += 1
    publishing.cancel()


async def scattered(mesh: EngineMesh, received: Path, ranks: Trainer, num_ranks: int, seed: int) -> None:
    """A version of which each worker gets its parts and no more."""
    sent = await publish(mesh, ranks, seed)
    assert sent["rows"] == sent["bytes"] // num_ranks
    assert sent["scatters"]
    parts = parts_of(received, mesh.version)
    assert len(parts) == WORKERS
    for part in parts:
        assert 0.5 * sent["bytes"] <= part["received"] < 0.52 * sent["bytes"]  # norms are whole
        assert part["largest"] <= LARGEST_PART_BYTES


async def publish(mesh: EngineMesh, ranks: Trainer, seed: int) -> dict[str, Any]:
    sent = await ranks.publish(seed)
    mesh.version = sent["version"]
    await mesh.activate(seed)
    await check_served(mesh)
    return sent


async def test_each_worker_gets_its_parts_and_is_to_the_bit_what_vllm_loads_of_whole_tensors(
    divided: EngineMesh, received: Path
) -> None:
    """Of two ranks, which end with one killed, of four, and of one; the last version is one that the hub keeps."""
    mesh, in_parts = divided, []
    async with trainer(mesh, 2, "3") as ranks:
        sent = await publish(mesh, ranks, 0)
        assert not sent["scatters"]  # no worker knew where vLLM puts a tensor
        assert [part["received"] for part in parts_of(received, 0)] == [sent["bytes"]] * WORKERS
        await scattered(mesh, received, ranks, 2, seed=1)
        await scattered(mesh, received, ranks, 2, seed=0)
        in_parts.append(live(received, mesh.version))
        await lose_a_rank(mesh, ranks)
    async with trainer(mesh, 4) as ranks:
        await scattered(mesh, received, ranks, 4, seed=1)
        await scattered(mesh, received, ranks, 4, seed=0)
        in_parts.append(live(received, mesh.version))
    async with trainer(mesh, 1) as ranks:  # a broadcast, of which each worker takes its parts
        for seed in (1, 0):
            sent = await publish(mesh, ranks, seed)
            assert not sent["scatters"]
            parts = parts_of(received, mesh.version)
            assert [part["received"] for part in parts] == [sent["bytes"]] * WORKERS
            assert all("largest" in part for part in parts)
        in_parts.append(live(received, mesh.version))
    mesh.epoch = next(EPOCHS)
    for seed, transport in ((1, Transport.STREAM), (0, Transport.FILESYSTEM)):
        await mesh.publish(seed, transport=transport)
        await check_served(mesh)
    for ours in in_parts:
        for part, loaded in zip(ours, live(received, mesh.version), strict=True):
            assert part.keys() == loaded.keys()
            assert all(torch.equal(tensor, loaded[name]) for name, tensor in part.items())


async def killed_in_a_broadcast(mesh: EngineMesh) -> None:
    """Ends the program alone; fails where a process outlives it."""
    senders = GroupSenders(num_senders=2, device=mesh.kind.device)
    async with WeightSyncClient(mesh.hub_address) as hub:
        parcel = await seal(mesh, hub, senders, seed=1)
        sending = asyncio.create_task(senders.send(parcel, senders=[0]))  # the second one never speaks
        await mesh.until(lambda engine: engine.state is AgentState.FETCHING)
    await asyncio.to_thread(mesh.engine.kill)
    senders.die()
    await asyncio.wait({sending})
    assert isinstance(sending.exception(), MeshError)


async def seal(mesh: EngineMesh, hub: WeightSyncClient, senders: GroupSenders, seed: int) -> Parcel:
    """Meets both processes in a new group, for the next version."""
    await senders.open(hub, num_receivers=WORKERS, epoch=mesh.epoch)
    parcel = senders.parcel(mesh.version + 1, plain_state(seed, mesh.kind.dtype), epoch=mesh.epoch)
    staged = await hub.create_version(parcel.manifest)
    mesh.version += 1
    await hub.seal_version(run_id="run", epoch=mesh.epoch, version=mesh.version, artifact_id=staged.artifact_id)
    return parcel


async def test_no_worker_outlives_a_program_that_is_killed_in_a_broadcast(divided: EngineMesh) -> None:
    await killed_in_a_broadcast(divided)


async def test_data_parallel_parts_serve_versions_over_files_chunks_and_a_group(data_parallel: EngineMesh) -> None:
    mesh = data_parallel
    for seed, transport in ((0, Transport.FILESYSTEM), (1, Transport.STREAM)):
        await mesh.publish(seed, transport=transport)
        await check_served(mesh, PROMPTS)
    await broadcast(mesh, seed=0)
    await check_served(mesh, PROMPTS)


async def broadcast(mesh: EngineMesh, seed: int) -> None:
    """Sends a version to a group with the engine; as a trainer does, in a new group when that one breaks."""
    async with WeightSyncClient(mesh.hub_address) as hub:
        (engine,) = await hub.list_engines()
        assert engine.collective_ranks == WORKERS
        for left in reversed(range(GROUPS)):
            senders = GroupSenders(num_senders=2, device=mesh.kind.device)
            try:
                await senders.send(await seal(mesh, hub, senders, seed))
                await mesh.activate(seed)
                return
            except MeshError as error:  # a machine whose cores are taken away for half a minute breaks groups
                if error.reason is not Reason.GROUP_BROKEN or not left:
                    raise
            finally:
                senders.die()


async def test_no_part_outlives_a_program_that_is_killed_in_a_broadcast(data_parallel: EngineMesh) -> None:
    await killed_in_a_broadcast(data_parallel)
