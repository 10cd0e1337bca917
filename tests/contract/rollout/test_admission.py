"""How many rollouts run at once: what the engines say they hold, as they come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from meshrl.wire.types import RolloutStatus


async def status_when(mesh, holds: Callable[[RolloutStatus], bool]) -> RolloutStatus:
    async with asyncio.timeout(60.0):
        while not holds(status := await mesh.client.get_status()):  # noqa: ASYNC110  # what the server says of itself
            await asyncio.sleep(0.02)
    return status


async def test_as_many_rollouts_run_as_the_engines_say_they_hold(start_mesh, make_engine, make_group):
    one = await make_engine(capacity={"slots": 4, "kv_tokens": 4096}, delay_s=600.0).start()
    other = make_engine(capacity={"slots": 8, "kv_tokens": 4096}, delay_s=600.0)
    try:
        mesh = await start_mesh([one])

        async def play() -> None:
            async for _ in mesh.client.run_rollouts(make_group(group_size=24, deadline_s=600.0)):
                pass

        playing = asyncio.create_task(play())
        status = await status_when(mesh, lambda now: now.running == 5)
        assert (status.running, status.queued, status.max_concurrent) == (5, 19, 5)
        assert [(engine.slots, engine.kv_tokens) for engine in status.engines] == [(4, 4096)]
        assert status.limit_reason.startswith(f"auto: engines hold 4 ({one.url} 4, its slots)")
        await other.start()
        mesh.runner._servers.engines.discover([(other.url, "")])
        status = await status_when(mesh, lambda now: now.running == 14)
        assert (status.running, status.queued, status.max_concurrent) == (14, 10, 14)
        await other.stop()
        status = await status_when(mesh, lambda now: now.max_concurrent < 14)
        assert (status.running, status.max_concurrent) == (14, 5)  # what runs goes on, nothing new starts
        playing.cancel()
    finally:
        await one.stop()
        await other.stop()
