"""SIGTERM: requests in flight are finished, new ones are refused, the program ends well. The last file on purpose:
the engine has to be started again for tests after it."""

from __future__ import annotations

import asyncio
import signal
import time

from engine_mesh import EngineClient, EngineMesh

LENGTH = 40


async def test_requests_in_flight_are_finished_before_the_program_ends(mesh: EngineMesh, client: EngineClient) -> None:
    expected = await client.greedy([1, 2, 3], LENGTH)
    await client.post("/pause")  # so that they are in flight for as long as this takes
    running = [asyncio.create_task(client.greedy([1, 2, 3], LENGTH)) for _ in range(2)]
    await client.until_in_flight(2)
    process = mesh.engine.process
    process.send_signal(signal.SIGTERM)
    end_s = time.monotonic() + 60.0
    while (health := await client.get("/health")).status == 200:
        assert time.monotonic() < end_s
    assert (health.status, health.body["status"]) == (503, "draining")
    refused = await client.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}})
    assert refused.status == 503
    assert "use another one" in refused.message
    assert (await client.post("/resume")).status == 200
    for task in running:
        assert (await task)["token_ids"] == expected["token_ids"]
    assert await asyncio.to_thread(process.wait, 60.0) == 0
