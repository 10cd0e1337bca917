"""Every engine samples what it says: tokens and logprobs against a plain forward pass, stops, seeds, streams."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import numpy as np
import pytest

from engine_requests import PROMPT, body_of, generate, read_choice, refused, until_in_flight
from running_engine import MAX_LEN, PlainModel, RunningEngine, read_events

pytestmark = pytest.mark.timeout(300)

Plain = dict[str, PlainModel]


def assert_close(engine: RunningEngine, found: list[float], expected: list[float]) -> None:
    gaps = np.abs(np.array(found) - np.array(expected))
    assert gaps.mean() <= engine.kind.mean_gap, gaps
    assert gaps.max() <= engine.kind.largest_gap, gaps


async def test_greedy_takes_the_likeliest_token_and_reports_its_logprob(
    engine: RunningEngine, http: aiohttp.ClientSession, plain: Plain
) -> None:
    version = await engine.serve("a")
    got = await generate(http, max_tokens=48)
    assert len(got.token_ids) == 48
    assert got.finish_reason == "length"
    assert got.spans == [(0, 48, version)]
    assert float(plain["a"].greedy_gaps(PROMPT, got.token_ids).max()) <= engine.kind.largest_gap
    assert_close(engine, got.logprobs, plain["a"].logprobs(PROMPT, got.token_ids).tolist())


@pytest.mark.parametrize(
    "cuts", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}], ids=str
)
async def test_logprobs_are_those_of_the_distribution_sampled_from(
    engine: RunningEngine, http: aiohttp.ClientSession, plain: Plain, cuts: dict[str, Any]
) -> None:
    await engine.serve("a")
    got = await generate(http, **{"temperature": 1.0, "max_tokens": 48, "seed": 3, **cuts})
    expected = plain["a"].logprobs(PROMPT, got.token_ids, **cuts).numpy()
    sure = np.isfinite(expected)  # a token at the very edge of a cut may fall on either side of it in bfloat16
    assert sure.mean() >= (1.0 if engine.kind.name == "embedded" else 0.9)
    gaps = np.abs(np.array(got.logprobs)[sure] - expected[sure])
    assert np.median(gaps) <= engine.kind.mean_gap
    assert gaps.mean() <= 3 * engine.kind.mean_gap, gaps


async def test_alternatives_are_the_likeliest_tokens_in_order(
    engine: RunningEngine, http: aiohttp.ClientSession, plain: Plain
) -> None:
    await engine.serve("a")
    async with http.post("/inference/v1/generate", json=body_of(logprobs=4)) as answer:
        choice = (await answer.json())["choices"][0]
    for entry, row in zip(choice["logprobs"]["content"], plain["a"].logits(PROMPT, choice["token_ids"]), strict=True):
        found = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(found) == 4
        assert found == sorted(found, reverse=True)
        assert_close(engine, found, row.log_softmax(-1).topk(4).values.tolist())


async def test_stops(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    await engine.serve("a")
    free = await generate(http, max_tokens=24)
    third = free.token_ids[2]
    first_at = free.token_ids.index(third)
    stopped = await generate(http, max_tokens=24, stop_token_ids=[third])
    assert stopped.token_ids == free.token_ids[: first_at + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", third)
    later = await generate(http, max_tokens=24, stop_token_ids=[third], min_tokens=first_at + 2)
    assert len(later.token_ids) > first_at + 1
    assert third not in later.token_ids[: first_at + 1]
    assert len((await generate(http, max_tokens=5)).token_ids) == 5
    room = await generate(http, max_tokens=MAX_LEN)
    assert len(room.token_ids) == MAX_LEN - len(PROMPT)
    assert room.finish_reason == "length"


async def test_end_of_turn_ends_a_completion_unless_ignored(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    await engine.serve("a")
    eos = 258  # of the models' tokenizer: <|im_end|>
    runs = await asyncio.gather(
        *[generate(http, temperature=1.5, seed=seed, max_tokens=200, ignore_eos=False) for seed in range(8)]
    )
    ended = [run for run in runs if run.finish_reason == "stop"]
    assert ended, "at this temperature some of eight completions end themselves"
    assert all(run.token_ids[-1] == eos and eos not in run.token_ids[:-1] for run in ended)


async def test_seeds_decide_the_sample(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    await engine.serve("a")
    one, same, other = await asyncio.gather(
        *[generate(http, temperature=1.0, seed=seed, max_tokens=32) for seed in (7, 7, 8)]
    )
    assert one.token_ids == same.token_ids
    assert one.token_ids != other.token_ids
    async with http.post("/inference/v1/generate", json=body_of(temperature=1.0, n=4, seed=5)) as answer:
        choices = [read_choice(choice) for choice in (await answer.json())["choices"]]
    assert len({tuple(choice.token_ids) for choice in choices}) == 4


async def test_stream_joins_to_the_whole_answer(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    version = await engine.serve("a")
    whole = await generate(http, max_tokens=24)
    async with http.post("/inference/v1/generate", json={**body_of(max_tokens=24), "stream": True}) as answer:
        choices = [read_choice(event["choices"][0]) for event in read_events(await answer.text())]
    assert len(choices) > 1
    assert [token for choice in choices for token in choice.token_ids] == whole.token_ids
    assert_close(engine, [value for choice in choices for value in choice.logprobs], whole.logprobs)
    assert choices[-1].finish_reason == "length"
    spans = [span for choice in choices for span in choice.spans]
    assert {span[2] for span in spans} == {version}
    assert max(end for _, end, _ in spans) == 24


async def test_text_routes_say_what_the_token_route_says(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    await engine.serve("a")
    tokens = await generate(http, max_tokens=12)
    body = {"prompt": list(PROMPT), "max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    async with http.post("/v1/completions", json=body) as answer:
        plain_text = (await answer.json())["choices"][0]
    assert plain_text["token_ids"] == tokens.token_ids
    chat = {
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "temperature": 0.0, "logprobs": True,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    async with http.post("/v1/chat/completions", json=chat) as answer:
        said = await answer.json()
    choice = said["choices"][0]
    assert len(choice["logprobs"]["content"]) == said["usage"]["completion_tokens"] == 24
    async with http.post("/v1/chat/completions", json={**chat, "stream": True}) as answer:
        events = read_events(await answer.text())
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(pieces) == choice["message"]["content"]


async def test_stop_string_cuts_the_text(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    await engine.serve("a")
    body = {"prompt": list(PROMPT), "max_tokens": 40, "temperature": 1.0, "seed": 2, "ignore_eos": True}
    async with http.post("/v1/completions", json=body) as answer:
        text = (await answer.json())["choices"][0]["text"]
    stop = text[6:8]
    async with http.post("/v1/completions", json={**body, "stop": stop}) as answer:
        choice = (await answer.json())["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


async def test_client_that_hangs_up_frees_its_place(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    await engine.serve("a")
    async with http.post("/pause"):
        pass
    try:
        call = asyncio.create_task(generate(http, max_tokens=200))
        await until_in_flight(http, 1)
        call.cancel()
        await asyncio.wait({call})
        await until_in_flight(http, 0)
    finally:
        async with http.post("/resume"):
            pass
    assert len((await generate(http)).token_ids) == 16


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [1] * MAX_LEN}, "context length"),
        ({"token_ids": [10**6]}, "token ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"sampling_params": {"top_p": 0.0}}, "top_p"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"n": 1000}}, "n"),
        ({"sampling_params": {"stop": "x"}}, "stop_token_ids"),
        ({"sampling_params": {"presence_penalty": 1.0}}, "presence_penalty"),
    ],
    ids=str,
)
async def test_bad_request_says_what_to_change(
    engine: RunningEngine, http: aiohttp.ClientSession, change: dict[str, Any], says: str
) -> None:
    await engine.serve("a")
    status, message = await refused(http, "/inference/v1/generate", {**body_of(), **change})
    assert status == 400
    assert says in message


async def test_server_describes_itself(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    version = await engine.serve("a")
    async with http.get("/v1/models") as answer:
        assert (await answer.json())["data"][0]["max_model_len"] == MAX_LEN
    async with http.get("/version") as answer:
        described = await answer.json()
    assert described["version"] == version
    assert described["logprobs_mode"] == "processed_logprobs"
    assert len(described["root"]) == 64
    async with http.get("/metrics") as answer:
        assert f"meshrl_engine_policy_version {version}" in await answer.text()
