"""The nccl transport, over gloo on the CPU: bytes from a sender's group straight into the engine, which checks them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch

from engine_mesh import EngineClient, EngineMesh, reference
from group_senders import GroupSenders, Parcel, flipped
from meshrl.client import WeightSyncClient
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Activation, AgentState, EngineInfo, capabilities
from plain_checks import check_greedy
from plain_model import logits_of, plain_state

PROMPT = [1, 2, 3]
pytestmark = pytest.mark.timeout(300)


@asynccontextmanager
async def group_of(mesh: EngineMesh, senders: GroupSenders) -> AsyncIterator[WeightSyncClient]:
    """A hub client once the engine and the senders are in a new group."""
    async with WeightSyncClient(mesh.hub_address) as hub:
        await asyncio.wait_for(senders.open(hub), 60.0)
        try:
            yield hub
        finally:
            senders.die()


async def until(hub: WeightSyncClient, holds: Callable[[EngineInfo], bool]) -> None:
    """Waits until the hub says so of the engine."""
    async with asyncio.timeout(60.0):
        while not holds((await hub.list_engines())[0]):  # noqa: ASYNC110 - another process, which tells nobody
            await asyncio.sleep(0.05)


async def seal(mesh: EngineMesh, hub: WeightSyncClient, parcel: Parcel) -> None:
    staged = await hub.create_version(parcel.manifest)
    mesh.version = parcel.manifest.version
    await hub.seal_version(run_id="run", epoch=1, version=mesh.version, artifact_id=staged.artifact_id)


async def activate(mesh: EngineMesh, hub: WeightSyncClient, prepare_deadline_s: float = 30.0) -> Activation:
    return await hub.activate_version(run_id="run", version=mesh.version, prepare_deadline_s=prepare_deadline_s)


async def activate_refused(mesh: EngineMesh, hub: WeightSyncClient) -> None:
    """Raises what the hub answers once the engine has refused the newest version."""
    about = f"version {mesh.version}"
    await until(hub, lambda engine: engine.last_fault is not None and about in engine.last_fault.message)
    await activate(mesh, hub, prepare_deadline_s=1.0)  # until then a trainer could send it again


async def check_served(mesh: EngineMesh, client: EngineClient, version: int) -> None:
    choice = await client.greedy(PROMPT)
    assert choice["version_spans"] == [[0, 40, version]]
    check_greedy(mesh.kind, logits_of(reference(mesh), PROMPT, choice["token_ids"]), choice)


@pytest.mark.parametrize("num_senders", [1, 2])
async def test_after_a_broadcast_the_engine_is_the_plain_model_of_the_new_weights(
    mesh: EngineMesh, client: EngineClient, num_senders: int
) -> None:
    senders = GroupSenders(num_senders=num_senders, device=mesh.kind.device)
    async with group_of(mesh, senders) as hub:
        for _ in range(2):
            seed = mesh.other_seed()
            parcel = senders.parcel(mesh.version + 1, plain_state(seed, mesh.kind.dtype))
            await seal(mesh, hub, parcel)
            await senders.send(parcel)
            activation = await activate(mesh, hub)
            mesh.seed = seed
            assert [each.applied.root for each in activation.engines] == [parcel.manifest.result_root]
            await check_served(mesh, client, mesh.version)


@pytest.mark.parametrize("num_senders", [1, 2])
async def test_after_a_delta_by_broadcast_the_engine_is_the_plain_model_of_the_new_weights(
    mesh: EngineMesh, client: EngineClient, num_senders: int
) -> None:
    senders = GroupSenders(num_senders=num_senders, device=mesh.kind.device)
    async with group_of(mesh, senders) as hub:
        (engine,) = await hub.list_engines()
        if capabilities.BROADCAST_DELTAS not in engine.capabilities:
            assert (mesh.kind.name, mesh.kind.device) == ("vllm", "cpu")
            pytest.skip("vLLM packs weights on a CPU, so it takes versions in full")
        seed = mesh.other_seed()
        new = plain_state(seed, mesh.kind.dtype)
        old = {name: torch.where(torch.rand(t.shape) < 0.03, t * 1.25, t) for name, t in new.items()}
        served = senders.parcel(mesh.version + 1, old)
        await seal(mesh, hub, served)
        await senders.send(served)
        await activate(mesh, hub)
        delta = senders.as_delta(senders.parcel(mesh.version + 1, new), served)
        assert delta.manifest.payload_bytes < served.manifest.num_bytes / 4
        await seal(mesh, hub, delta)
        await senders.send(delta)
        await activate(mesh, hub)
        mesh.seed = seed
        await check_served(mesh, client, mesh.version)
        of_another = senders.as_delta(senders.parcel(mesh.version + 1, old), senders.parcel(0, old))
        await seal(mesh, hub, of_another)
        await senders.send(of_another)
        with pytest.raises(MeshError, match="is refused: it is for other weights than those served"):
            await activate_refused(mesh, hub)
        await check_served(mesh, client, mesh.version - 1)
    await mesh.publish(mesh.other_seed())
    await check_served(mesh, client, mesh.version)


async def test_damaged_broadcast_is_refused_and_the_old_weights_stay(mesh: EngineMesh, client: EngineClient) -> None:
    before = mesh.version
    senders = GroupSenders(device=mesh.kind.device)
    async with group_of(mesh, senders) as hub:
        parcel = senders.parcel(mesh.version + 1, plain_state(mesh.other_seed(), mesh.kind.dtype))
        await seal(mesh, hub, parcel)
        await senders.send(flipped(parcel))
        with pytest.raises(MeshError, match="DIGEST_MISMATCH") as refused:
            await activate_refused(mesh, hub)
        assert refused.value.reason is Reason.ENGINES_NOT_READY
        await check_served(mesh, client, before)
    await mesh.publish(mesh.other_seed())
    await check_served(mesh, client, mesh.version)


async def test_sender_that_dies_leaves_the_old_weights_and_the_next_version_comes(
    mesh: EngineMesh, client: EngineClient
) -> None:
    before = mesh.version
    senders = GroupSenders(num_senders=2, device=mesh.kind.device)
    async with group_of(mesh, senders) as hub:
        parcel = senders.parcel(mesh.version + 1, plain_state(mesh.other_seed(), mesh.kind.dtype))
        await seal(mesh, hub, parcel)
        sending = asyncio.create_task(senders.send(parcel, senders=[0]))  # the second one never speaks
        await until(hub, lambda engine: engine.state is AgentState.FETCHING)
        senders.die()
        await asyncio.wait({sending})
        assert isinstance(sending.exception(), MeshError | None)
        await check_served(mesh, client, before)
    await mesh.publish(mesh.other_seed())
    await check_served(mesh, client, mesh.version)
