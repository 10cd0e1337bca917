"""Streams carry the same completion in pieces and end with [DONE]; a client that leaves frees its slot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest

from engine_mesh import MODEL_NAME, SLOTS, EngineClient, EngineMesh, logprobs_of

PROMPT = [1, 2, 3]
ATTEMPTS = 5
GENERATE = "/inference/v1/generate"


def generate_body(**sampling: Any) -> dict[str, Any]:
    params = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1, **sampling}
    return {"model": MODEL_NAME, "token_ids": PROMPT, "sampling_params": params}


async def events(client: EngineClient, path: str, body: Mapping[str, Any]) -> AsyncIterator[str]:
    """The data of each event."""
    async with client.session.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            text = line.decode().rstrip("\n")
            if text:
                assert text.startswith("data: ")
                yield text.removeprefix("data: ")


async def read(client: EngineClient, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every event but the last, which is [DONE]."""
    found = [event async for event in events(client, path, body)]
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


async def test_pieces_of_a_token_stream_join_to_the_whole_answer(mesh: EngineMesh, client: EngineClient) -> None:
    whole = await client.generate(PROMPT, n=2, seed=5)
    pieces = [event["choices"][0] for event in await read(client, GENERATE, generate_body(n=2, seed=5))]
    assert len(pieces) > 2  # it comes while it is made, in as many pieces as the server finds time for
    for index in range(2):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert [token for piece in mine for token in piece["token_ids"]] == whole[index]["token_ids"]
        joined = [logprob for piece in mine for logprob in logprobs_of(piece)]
        assert joined == pytest.approx(logprobs_of(whole[index]), abs=mesh.kind.logprob_atol)
        spans = [span for piece in mine for span in piece["version_spans"]]
        assert (spans[0][0], spans[-1][1]) == (0, 40)
        assert {version for *_, version in spans} == {mesh.version}
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + ["length"]


async def test_text_stream_ends_at_a_stop_string(client: EngineClient) -> None:
    body = {"model": MODEL_NAME, "prompt": "abc", "temperature": 0.0, "max_tokens": 600, "ignore_eos": True}
    whole = (await client.post("/v1/completions", {**body, "max_tokens": 40})).body["choices"][0]["text"]
    found = await read(client, "/v1/completions", {**body, "stop": whole[5:8]})
    assert "".join(event["choices"][0]["text"] for event in found) == whole[: whole.index(whole[5:8])]
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
    await client.until_in_flight(0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_frees_its_slots(client: EngineClient, stream: bool) -> None:
    body = {**generate_body(n=SLOTS, max_tokens=1000), "stream": stream}
    for _ in range(ATTEMPTS):  # on a busy machine the client may leave when they are done
        before = await finished(client)
        (request,) = await client.begin(hold(client.session, body), in_flight=SLOTS)
        request.cancel()
        await asyncio.wait({request})
        await client.until_in_flight(0)
        if (done := await finished(client) - before) == 0:
            break
    assert done == 0
    assert len((await client.one(PROMPT, max_tokens=3))["token_ids"]) == 3


async def finished(client: EngineClient) -> float:
    return (await client.metrics())["meshrl_engine_finished_requests_total"]


async def hold(session: aiohttp.ClientSession, body: Mapping[str, Any]) -> None:
    async with session.post(GENERATE, json=body) as response:
        await response.read()
