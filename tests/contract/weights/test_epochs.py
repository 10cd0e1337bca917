"""A trainer that restarts publishes numbers that engines have served before: the later epoch's bytes replace them."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.trainer.publishing.build import claimable_epoch
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import ActivationPolicy, Transport
from weight_mesh import MemoryEngine, Mesh, make_state


@pytest.mark.parametrize(
    ("transport", "policy"),
    [(Transport.FILESYSTEM, ActivationPolicy.ROLLING), (Transport.STREAM, ActivationPolicy.GANG)],
)
async def test_a_later_epoch_replaces_the_bytes_of_a_version_that_engines_serve(
    mesh: Mesh, engine: MemoryEngine, transport: Transport, policy: ActivationPolicy
) -> None:
    other = MemoryEngine(make_state(7))
    mesh.start_agent("e0", engine)
    mesh.start_agent("e1", other)
    await mesh.until_registered(2)
    first = mesh.publisher(transport, epoch=1)
    for version in (1, 2, 3):
        await first.publish(version, make_state(version))
        await mesh.activate(version, policy=policy)
    assert engine.holds(make_state(3))

    second = mesh.publisher(transport, epoch=2)
    await second.publish(1, make_state(1))  # its checkpoint
    assert (engine.version, other.version) == (3, 3)  # nothing moves before it is told to
    for version in (2, 3, 4):
        report = await second.publish(version, make_state(10 + version))
        activation = await mesh.activate(version, policy=policy)
        assert (activation.version.epoch, activation.version.version) == (2, version)
        assert {applied.applied.root for applied in activation.engines} == {report.root}
        for served in (engine, other):
            assert served.version == version
            assert served.holds(make_state(10 + version))


async def test_an_engine_that_joins_between_the_epochs_gets_what_was_decided_last(
    mesh: Mesh, engine: MemoryEngine, transport: Transport
) -> None:
    mesh.start_agent("e0", engine)
    await mesh.until_registered()
    first = mesh.publisher(transport, epoch=1)
    await first.publish(3, make_state(3))
    await mesh.activate(3)
    second = mesh.publisher(transport, epoch=2)
    await second.publish(2, make_state(12))
    await second.publish(3, make_state(13))
    late = MemoryEngine(make_state(7))
    mesh.start_agent("late", late)
    await mesh.until(lambda: late.version == 3)
    assert late.holds(make_state(3))  # committed, and its bytes are still there
    await mesh.activate(3)
    await mesh.until(lambda: late.holds(make_state(13)) and engine.holds(make_state(13)))
    assert (engine.version, late.version) == (3, 3)


async def test_what_was_sealed_and_not_decided_goes_with_its_epoch(
    mesh: Mesh, engine: MemoryEngine, transport: Transport
) -> None:
    mesh.start_agent("e0", engine)
    first = mesh.publisher(transport, epoch=1)
    await first.publish(1, make_state(1))
    await mesh.activate(1)
    await first.publish(2, make_state(2))
    await mesh.publisher(transport, epoch=2).publish(1, make_state(1))
    with pytest.raises(MeshError) as caught:
        await mesh.activate(2)
    assert caught.value.reason is Reason.VERSION_SUPERSEDED
    again = await asyncio.wait_for(mesh.activate(1), 60.0)
    assert again.version.epoch == 2
    assert engine.holds(make_state(1))
    assert engine.history.count("apply 1") == 1  # the same bytes are not moved again


async def test_an_epoch_beyond_the_next_is_refused_and_keeps_nobody_out(mesh: Mesh, engine: MemoryEngine) -> None:
    mesh.start_agent("e0", engine)
    await mesh.publisher(Transport.STREAM, epoch=7).publish(1, make_state(1))  # the first one may have any number
    with pytest.raises(MeshError, match="must be at most 8, got 9: this hub is in epoch 7") as caught:
        await mesh.publisher(Transport.STREAM, epoch=9).publish(1, make_state(2))
    assert caught.value.reason is Reason.INVALID_REQUEST
    group = {"store_address": "h:1", "backend": "gloo", "num_senders": 1, "deadline_s": 1.0}
    with pytest.raises(MeshError, match="must be at most 8"):
        await mesh.client().open_group(run_id="run", epoch=2**63, **group)
    await mesh.publisher(Transport.STREAM, epoch=8).publish(1, make_state(3))
    await mesh.activate(1)
    assert engine.holds(make_state(3))


async def test_trainer_that_started_several_times_without_publishing_claims_the_next_epoch(mesh: Mesh) -> None:
    assert await claimable_epoch(mesh.client(), 3) == 3  # nobody has published yet
    await mesh.publisher(Transport.STREAM, epoch=3).publish(1, make_state(1))
    assert await claimable_epoch(mesh.client(), 6) == 4
    assert await claimable_epoch(mesh.client(), 2) == 2  # its folder is of an older run: refused as stale
    client = mesh.client()
    await mesh.kill_hub()
    assert await claimable_epoch(client, 6) == 6  # nobody to ask yet
