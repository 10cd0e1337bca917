"""The embedded engine in groups of the nccl transport, with real senders over gloo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from group_senders import GroupSenders, flipped
from inference_kit import EngineFactory, ask, complete, full_forward, make_model
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.inference.embedded.staging import LiveWeights
from meshrl.inference.engine import CollectiveSupport
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


@pytest.mark.parametrize("num_senders", [1, 3])
async def test_version_comes_through_a_group_while_requests_run(
    start_engine: EngineFactory, num_senders: int, new_senders: Senders
) -> None:
    engine = await start_engine(max_model_len=300)
    assert engine.collective == CollectiveSupport(ranks=1, backend="gloo")
    senders, other = new_senders(num_senders=num_senders), make_model(seed=5)
    running = asyncio.create_task(complete(engine, ask([1, 2, 3], max_tokens=250)))
    await together(engine, senders, 1)
    for version in (1, 2):
        parcel = senders.parcel(version, hf_state(other))
        await asyncio.gather(engine.receive(parcel.manifest), senders.send(parcel))
    assert engine.version == 0
    await serve(engine, parcel.manifest)
    assert (engine.version, engine.root) == (2, parcel.manifest.result_root)
    assert await engine.weights_root() == LiveWeights(other).root()
    assert len((await running).token_ids) == 250
    made = await complete(engine, ask([1, 2], max_tokens=8))
    expected = full_forward(other, [1, 2], made.token_ids.tolist())
    torch.testing.assert_close(torch.from_numpy(made.logprobs), torch.from_numpy(expected), atol=1e-4, rtol=0)


async def test_damage_on_the_way_is_refused_and_a_new_group_brings_the_next_version(
    start_engine: EngineFactory, new_senders: Senders
) -> None:
    engine = await start_engine()
    before = await engine.weights_root()
    senders = new_senders(num_senders=2)
    await together(engine, senders, 1)
    parcel = senders.parcel(1, hf_state(make_model(seed=5)))
    results = await asyncio.gather(
        engine.receive(parcel.manifest), senders.send(flipped(parcel)), return_exceptions=True
    )
    assert isinstance(results[0], MeshError)
    assert results[0].reason is Reason.DIGEST_MISMATCH
    await engine.pause()
    with pytest.raises(MeshError, match="nothing"):
        await engine.apply(1, parcel.manifest.result_root)
    await engine.resume()
    assert await engine.weights_root() == before
    await together(engine, senders, 2)
    await asyncio.gather(engine.receive(parcel.manifest), senders.send(parcel))
    await serve(engine, parcel.manifest)
    assert engine.version == 1


async def test_dead_sender_breaks_the_transfer_and_nothing_else(
    start_engine: EngineFactory, new_senders: Senders
) -> None:
    engine = await start_engine()
    senders = new_senders(num_senders=2)
    await together(engine, senders, 1)
    parcel = senders.parcel(1, hf_state(make_model(seed=5)))
    receiving = asyncio.create_task(engine.receive(parcel.manifest))
    sending = asyncio.create_task(senders.send(parcel, senders=[0]))  # the other one never sends its share
    await asyncio.sleep(0.2)
    senders.die()
    with pytest.raises(MeshError) as broken:
        await receiving
    await asyncio.wait({sending})
    assert sending.exception() is not None
    assert broken.value.reason is Reason.GROUP_BROKEN
    assert len((await complete(engine, ask([1]))).token_ids) == 8
    with pytest.raises(MeshError, match="in none"):
        await engine.receive(parcel.manifest)


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
