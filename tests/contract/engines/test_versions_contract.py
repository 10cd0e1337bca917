"""Every engine takes versions under running requests: exact spans, no old weights afterwards, pauses that keep all."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
import torch

from engine_requests import PROMPT, Completion, generate, in_flight, until_in_flight
from meshrl.wire.errors import MeshError, Reason
from meshrl.wire.types import Transport
from running_engine import PlainModel, RunningEngine

pytestmark = pytest.mark.timeout(300)

Plain = dict[str, PlainModel]
LONG = 240


async def test_pause_keeps_requests_and_their_tokens(
    engine: RunningEngine, http: aiohttp.ClientSession, plain: Plain
) -> None:
    version = await engine.serve("a")
    alone = await generate(http, max_tokens=LONG)
    calls = [asyncio.create_task(generate(http, max_tokens=LONG)) for _ in range(4)]
    await asyncio.sleep(0.05)
    async with http.post("/pause") as answer:
        assert (await answer.json())["in_flight"] <= 4
    late = asyncio.create_task(generate(http, max_tokens=8))  # waits for the resume
    await asyncio.sleep(0.3)
    held = await in_flight(http)
    before = [call.done() for call in calls]
    await asyncio.sleep(0.3)
    assert [call.done() for call in calls] == before, "nothing is produced in a pause"
    assert held >= 1
    assert not late.done()
    async with http.post("/resume"):
        pass
    for got in await asyncio.gather(*calls):
        assert got.spans == [(0, LONG, version)]
        same = sum(1 for one, other in zip(got.token_ids, alone.token_ids, strict=True) if one == other)
        assert same == LONG or engine.kind.name == "vllm"  # in bfloat16 another batch may break a tie another way
        assert float(plain["a"].greedy_gaps(PROMPT, got.token_ids).max()) <= engine.kind.largest_gap
    assert len((await late).token_ids) == 8


async def test_version_mid_request_splits_its_spans_exactly(
    engine: RunningEngine, http: aiohttp.ClientSession, plain: Plain
) -> None:
    old = await engine.serve("a")
    new = await engine.seal(engine.state("b"))
    await asyncio.sleep(0.5)  # it is prepared meanwhile
    await http.post("/pause")
    calls = [asyncio.create_task(generate(http, max_tokens=LONG)) for _ in range(6)]
    await until_in_flight(http, 6)
    await http.post("/resume")
    await asyncio.sleep(0.05)
    activation = await engine.activate(new)
    engine.serving = "b"
    done = await asyncio.gather(*calls)
    assert activation.engines[0].applied.pause_s < 5.0
    assert any(len(got.spans) == 2 for got in done), [got.spans for got in done]
    for got in done:
        assert got.spans[0][0] == 0
        assert got.spans[-1][1] == LONG
        assert [span[2] for span in got.spans] == sorted({span[2] for span in got.spans} & {old, new})
        if len(got.spans) == 2:
            (_, cut, _), (start, _, _) = got.spans
            assert start == cut
            assert float(plain["a"].greedy_gaps(PROMPT, got.token_ids[:cut]).max()) <= engine.kind.largest_gap
            assert float(plain["a"].greedy_gaps(PROMPT, got.token_ids)[cut:].max()) > engine.kind.largest_gap


@pytest.mark.parametrize("transport", [Transport.FILESYSTEM, Transport.STREAM], ids=lambda value: value.value)
async def test_new_version_is_what_is_served_and_not_what_was_cached(
    engine: RunningEngine, http: aiohttp.ClientSession, plain: Plain, transport: Transport
) -> None:
    await engine.serve("a")
    prompt = PROMPT * 8  # longer than a block of any prefix cache
    before = await generate(http, prompt)
    assert float(plain["a"].greedy_gaps(prompt, before.token_ids).max()) <= engine.kind.largest_gap
    activation = await engine.publish(engine.state("b"), transport)
    engine.serving = "b"
    after = await generate(http, prompt)
    assert after.spans == [(0, 16, engine.version)]
    assert float(plain["b"].greedy_gaps(prompt, after.token_ids).max()) <= engine.kind.largest_gap
    assert float(plain["a"].greedy_gaps(prompt, after.token_ids).max()) > engine.kind.largest_gap
    async with http.get("/version") as answer:
        assert (await answer.json())["root"] == activation.engines[0].applied.root.hex()


async def test_version_that_does_not_fit_is_refused_and_the_old_one_stays(
    engine: RunningEngine, http: aiohttp.ClientSession, plain: Plain
) -> None:
    version = await engine.serve("a")
    narrow = engine.state("b")
    narrow["model.norm.weight"] = torch.ones(64, dtype=engine.kind.dtype)
    bad = await engine.seal(narrow)
    with pytest.raises(MeshError, match=r"model\.norm\.weight") as refusal:
        await engine.activate(bad)
    assert refusal.value.reason is Reason.ENGINES_NOT_READY
    got: Completion = await generate(http)
    assert got.spans == [(0, 16, version)]
    assert float(plain["a"].greedy_gaps(PROMPT, got.token_ids).max()) <= engine.kind.largest_gap
    await engine.serve("b")
    assert float(plain["b"].greedy_gaps(PROMPT, (await generate(http)).token_ids).max()) <= engine.kind.largest_gap


async def test_checkpoint_folders_are_served_on_request(
    engine: RunningEngine, http: aiohttp.ClientSession, plain: Plain
) -> None:
    await engine.serve("a")
    for path, body, name in [
        ("/update_weights", {"weight_dir": str(engine.models["b"])}, "b"),
        ("/reload_weights", {}, "a"),
    ]:
        async with http.post(path, json=body) as answer:
            assert answer.status == 200, await answer.text()
        engine.serving = ""
        got = await generate(http)
        assert float(plain[name].greedy_gaps(PROMPT, got.token_ids).max()) <= engine.kind.largest_gap
    async with http.post("/update_weights", json={"weight_dir": "/nowhere"}) as answer:
        assert answer.status == 400
        assert "/nowhere" in (await answer.json())["error"]["message"]
