"""Defects in what an agent or a publisher does in the background: somebody hears of each, and nobody waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshrl.inference.engine import CollectiveSupport
from meshrl.wire.errors import Reason
from meshrl.wire.types import ActivationPolicy, Transport
from weight_mesh import MemoryEngine, Mesh, make_state


async def broken(*arguments: Any) -> Any:
    raise RuntimeError("a defect")


async def test_agent_ends_when_its_engine_cannot_go_on_after_a_held_swap(mesh: Mesh, engine: MemoryEngine) -> None:
    mesh.start_agent("e0", engine)
    await mesh.until_registered()
    engine.resume = broken
    await mesh.publisher(Transport.STREAM).publish(0, make_state(1))
    activating = asyncio.create_task(
        mesh.client().activate_version(
            run_id="run", version=0, policy=ActivationPolicy.GANG, min_ready=1, prepare_deadline_s=20.0
        )
    )
    running, _ = mesh._agents.pop("e0")
    with pytest.raises(RuntimeError, match="a defect"):
        await asyncio.wait_for(running, 60.0)
    activating.cancel()
    await asyncio.wait({activating})


async def test_hub_hears_of_a_defect_while_an_engine_joins_a_group(mesh: Mesh, engine: MemoryEngine) -> None:
    engine.collective = CollectiveSupport(ranks=1, backend="gloo")
    engine.join_group = broken
    mesh.start_agent("e0", engine)
    await mesh.until_registered()
    await mesh.client().open_group(
        run_id="run", epoch=1, store_address="127.0.0.1:9", backend="gloo", num_senders=1, deadline_s=20.0
    )
    await mesh.until(lambda: mesh.hub.list_engines("")[0].last_fault is not None, deadline_s=20.0)
    fault = mesh.hub.list_engines("")[0].last_fault
    assert (fault.reason, fault.message) == (Reason.INTERNAL.name, "RuntimeError('a defect')")
