"""The embedded engine in groups of the nccl transport, with real senders over gloo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from group_senders import GroupSenders
from inference_kit import EngineFactory, ask, complete, make_model
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.models.state import hf_state
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Manifest

pytestmark = pytest.mark.usefixtures("deadline")

Senders = Callable[..., GroupSenders]


@pytest.fixture
async def deadline() -> object:
    async with asyncio.timeout(60.0):
        yield


async def together(engine: EmbeddedEngine, senders: GroupSenders, generation: int) -> None:
    await asyncio.gather(engine.join_group(senders.group(generation)), senders.meet(generation))


async def serve(engine: EmbeddedEngine, manifest: Manifest) -> None:
    await engine.pause()
    await engine.apply(manifest.version, manifest.result_root)
    await engine.resume()


async def test_cancelled_transfer_leaves_the_group_so_that_senders_do_not_wait(
    start_engine: EngineFactory, new_senders: Senders
) -> None:
    engine = await start_engine()
    senders = new_senders()
    await together(engine, senders, 1)
    parcel = senders.parcel(1, hf_state(make_model(seed=5)))
    receiving = asyncio.create_task(engine.receive(parcel.manifest))
    await asyncio.sleep(0.05)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving

    async def send_much() -> None:
        for _ in range(50):  # what fits into the socket's buffers leaves before the sender notices
            await senders.send(parcel, stall_s=0.5)

    with pytest.raises(MeshError) as broken:
        await send_much()
    assert broken.value.reason is Reason.GROUP_BROKEN


async def test_group_nobody_else_comes_to_is_given_up_at_its_deadline(
    start_engine: EngineFactory, new_senders: Senders
) -> None:
    engine = await start_engine()
    senders = new_senders()
    with pytest.raises(MeshError, match="did not come within") as broken:
        await engine.join_group(replace(senders.group(1), deadline_s=0.5))
    assert broken.value.reason is Reason.GROUP_BROKEN
    assert len((await complete(engine, ask([1]))).token_ids) == 8


async def test_newer_group_takes_the_place_of_one_that_is_joined_or_in_use(
    start_engine: EngineFactory, new_senders: Senders
) -> None:
    engine = await start_engine()
    senders = new_senders()
    waiting = asyncio.create_task(engine.join_group(senders.group(1)))  # whose senders never come
    await asyncio.sleep(0.05)
    waiting.cancel()
    await together(engine, senders, 2)
    parcel = senders.parcel(1, hf_state(make_model(seed=5)))
    stuck = asyncio.create_task(engine.receive(parcel.manifest))
    await asyncio.sleep(0.05)
    newer = new_senders()
    await together(engine, newer, 3)
    with pytest.raises(MeshError) as broken:
        await stuck
    assert broken.value.reason is Reason.GROUP_BROKEN
    await asyncio.gather(engine.receive(parcel.manifest), newer.send(parcel))
    await serve(engine, parcel.manifest)
    assert engine.version == 1


async def test_version_of_another_model_is_refused(start_engine: EngineFactory, new_senders: Senders) -> None:
    engine = await start_engine()
    senders = new_senders()
    await together(engine, senders, 1)
    parcel = senders.parcel(1, {"model.norm.weight": torch.zeros(32)})
    with pytest.raises(MeshError) as refused:
        await asyncio.gather(engine.receive(parcel.manifest), senders.send(parcel))
    assert refused.value.reason is Reason.LAYOUT_MISMATCH
    assert engine.version == 0
