"""A pause stops every request between two tokens and loses none: after it each goes on as if nothing had been."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial

import pytest

from engine_mesh import ATTEMPTS, MODEL_NAME, EngineClient, EngineMesh, logprobs_of

LENGTH = 240  # half a second of work for either engine
LONG_ENOUGH_S = 0.5  # many steps of either engine
PROMPTS = [[1, 2, 3], [4, 5], [6] * 30]


@pytest.fixture
async def resumed(client: EngineClient) -> AsyncIterator[None]:
    """Whatever a test does, the engine runs afterwards."""
    yield
    await client.post("/resume")


@pytest.mark.usefixtures("resumed")
async def test_requests_in_flight_are_kept_and_end_as_without_a_pause(mesh: EngineMesh, client: EngineClient) -> None:
    expected = await asyncio.gather(*(client.greedy(prompt, LENGTH) for prompt in PROMPTS))
    running = await client.catch(*(partial(client.greedy, prompt, LENGTH) for prompt in PROMPTS))
    await asyncio.sleep(LONG_ENOUGH_S)
    assert not any(task.done() for task in running)
    version = await client.version()
    assert (version["paused"], version["in_flight"]) == (True, 3)
    assert (await client.post("/resume")).body["status"] == "running"
    for task, before in zip(running, expected, strict=True):
        choice = await task
        assert choice["token_ids"] == before["token_ids"]
        assert logprobs_of(choice) == pytest.approx(logprobs_of(before), abs=mesh.kind.logprob_atol)
        assert choice["version_spans"] == [[0, LENGTH, mesh.version]]
    assert (await client.version())["in_flight"] == 0


@pytest.mark.usefixtures("resumed")
async def test_nothing_is_made_while_paused(client: EngineClient) -> None:
    expected = await client.greedy([1, 2, 3], LENGTH)
    body = {
        "model": MODEL_NAME, "token_ids": [1, 2, 3], "stream": True,
        "sampling_params": {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True},
    }  # fmt: skip

    async def read(made: list[int], begun: asyncio.Event) -> None:
        async with client.session.post("/inference/v1/generate", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    made.extend(json.loads(line[6:])["choices"][0]["token_ids"])
                    begun.set()

    for _ in range(ATTEMPTS):  # on a busy machine a pause may come too late
        made: list[int] = []
        begun = asyncio.Event()
        reading = asyncio.create_task(read(made, begun))
        await asyncio.wait_for(begun.wait(), 60.0)
        await client.post("/pause")
        count = -1
        while count != len(made):  # some may be on its way
            count = len(made)
            await asyncio.sleep(LONG_ENOUGH_S)
        if count < LENGTH:
            break
        await client.post("/resume")
        await asyncio.wait_for(reading, 60.0)
    assert 0 < count < LENGTH
    await client.post("/resume")
    await asyncio.wait_for(reading, 60.0)
    assert made == expected["token_ids"]


@pytest.mark.usefixtures("resumed")
async def test_a_request_that_comes_in_a_pause_waits_for_its_end(client: EngineClient) -> None:
    expected = await client.greedy([1, 2, 3])
    await client.post("/pause")
    waiting = asyncio.create_task(client.greedy([1, 2, 3]))
    await client.until_in_flight(1)
    await asyncio.sleep(LONG_ENOUGH_S)
    assert not waiting.done()
    await client.post("/resume")
    assert (await waiting)["token_ids"] == expected["token_ids"]


@pytest.mark.usefixtures("resumed")
async def test_a_client_that_leaves_in_a_pause_frees_its_slot(client: EngineClient) -> None:
    (request,) = await client.begin(client.greedy([1, 2, 3], LENGTH))
    await client.post("/pause")
    request.cancel()
    await asyncio.wait({request})
    await client.until_in_flight(0)
    await client.post("/resume")
    assert len((await client.greedy([1, 2, 3], 3))["token_ids"]) == 3


@pytest.mark.usefixtures("resumed")
async def test_pausing_or_resuming_twice_is_harmless(client: EngineClient) -> None:
    for path, said in (("/pause", "paused"), ("/pause", "paused"), ("/resume", "running"), ("/resume", "running")):
        answer = await client.post(path)
        assert (answer.status, answer.body["status"]) == (200, said)
    assert len((await client.greedy([1, 2, 3], 3))["token_ids"]) == 3
