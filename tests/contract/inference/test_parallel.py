"""vLLM on several processes: each loads its own share of a version, whichever way it comes, and they stay in step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from engine_mesh import EngineClient, EngineMesh, reference
from group_senders import GroupSenders, Parcel
from meshrl.client import WeightSyncClient
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import AgentState, Transport
from plain_checks import check_greedy
from plain_model import logits_of, plain_state

PROMPTS = ([1, 2, 3], [1 + index % 63 for index in range(400)])
REQUESTS = 4  # of each prompt, so that every part of the engine gets some
TOKENS = 10  # of each; processes that wait for each other take their time for one
GROUPS = 3
LEASE_S = 60.0  # two processes of an engine and the tests' own on a machine that may have two cores
SIZES = {"tensor": "tensor_parallel_size", "data": "data_parallel_size"}


@pytest.fixture(scope="module", params=sorted(SIZES))
def parallel_mesh(request: pytest.FixtureRequest, start_mesh: Callable[..., EngineMesh]) -> EngineMesh:
    return start_mesh("vllm", vllm={SIZES[request.param]: 2}, lease_s=LEASE_S)


async def check_served(mesh: EngineMesh) -> None:
    async with mesh.session() as session:
        client = EngineClient(session)
        for prompt in PROMPTS:
            for choice in await asyncio.gather(*(client.greedy(prompt, TOKENS) for _ in range(REQUESTS))):
                assert choice["version_spans"] == [[0, TOKENS, mesh.version]]
                check_greedy(mesh.kind, logits_of(reference(mesh), prompt, choice["token_ids"]), choice)


async def test_versions_are_the_plain_model_over_files_chunks_and_a_group(parallel_mesh: EngineMesh) -> None:
    mesh = parallel_mesh
    for seed, transport in ((0, Transport.FILESYSTEM), (1, Transport.STREAM)):
        await mesh.publish(seed, transport=transport)
        await check_served(mesh)
    await broadcast(mesh, seed=0)
    await check_served(mesh)


async def test_no_process_outlives_a_program_that_is_killed_in_a_broadcast(parallel_mesh: EngineMesh) -> None:
    mesh, senders = parallel_mesh, GroupSenders(num_senders=2, device=parallel_mesh.kind.device)
    async with WeightSyncClient(mesh.hub_address) as hub:
        parcel = await seal(mesh, hub, senders, seed=1)
        sending = asyncio.create_task(senders.send(parcel, senders=[0]))  # the second one never speaks
        await mesh.until(lambda engine: engine.state is AgentState.FETCHING)
    await asyncio.to_thread(mesh.engine.kill)
    senders.die()
    await asyncio.wait({sending})
    assert isinstance(sending.exception(), MeshError)


async def broadcast(mesh: EngineMesh, seed: int) -> None:
    """Sends a version to a group with the engine; as a trainer does, in a new group when that one breaks."""
    async with WeightSyncClient(mesh.hub_address) as hub:
        (engine,) = await hub.list_engines()
        assert engine.collective_ranks == 2
        for left in reversed(range(GROUPS)):
            senders = GroupSenders(num_senders=2, device=mesh.kind.device)
            try:
                await send(mesh, hub, senders, seed)
                return
            except MeshError as error:  # a machine whose cores are taken away for half a minute breaks groups
                if error.reason is not Reason.GROUP_BROKEN or not left:
                    raise
            finally:
                senders.die()


async def send(mesh: EngineMesh, hub: WeightSyncClient, senders: GroupSenders, seed: int) -> None:
    await senders.send(await seal(mesh, hub, senders, seed))
    await mesh.activate(seed)


async def seal(mesh: EngineMesh, hub: WeightSyncClient, senders: GroupSenders, seed: int) -> Parcel:
    """Meets both processes in a new group, for the next version."""
    await senders.open(hub, num_receivers=2)
    parcel = senders.parcel(mesh.version + 1, plain_state(seed, mesh.kind.dtype))
    staged = await hub.create_version(parcel.manifest)
    mesh.version += 1
    await hub.seal_version(run_id="run", epoch=1, version=mesh.version, artifact_id=staged.artifact_id)
    return parcel
