"""What verifiers has of environments, each played by the rollout service: user simulation, best of n, judges."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from verifiers.v1.errors import InterceptionError
from verifiers.v1.interception import InterceptionServer

from http_servers import chat_answer, serving_http
from meshrl.environments.harness import InterceptionCalls


def asked(request: dict[str, Any]) -> str:
    """The prompt of a call to the scripted engine, as text."""
    return "".join(chr(29 + token) if 2 < token < 98 else "|" for token in request["token_ids"])


NO_NUMBER = r"reward 'right' \(/.*/mesh_zoo.py:\d+\) returned {}; return a number in every case, such as 0.0"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("none", NO_NUMBER.format("None")),
        ("text", NO_NUMBER.format("text")),
        ("nan", r"a reward is not a finite number of single precision: \{'right': nan\}"),
        ("plain", r".*an awaitable is required; write each reward and metric as `async def`"),
        ("enormous", r"a reward is not a finite number of single precision: \{'right': 1e\+308\}"),
    ],
)
async def test_a_reward_that_cannot_be_used_is_named(start_mesh, make_group, engine, kind, words):
    env = [{"id": "mesh_zoo", "args": {"kind": kind}}]
    mesh = await start_mesh([engine], env=env)
    failure, _ = await mesh.collect(make_group(environment="mesh_zoo"))
    assert (failure.reason, bool(re.fullmatch(words, failure.message))) == ("ENVIRONMENT_FAILED", True), failure.message


async def test_a_simulated_user_talks_to_the_policy_and_only_the_policy_trains(start_mesh, make_group, engine):
    def reply(request: dict[str, Any]) -> str:
        if "role-playing a USER" not in asked(request):
            return "cat"
        return "please say cat" if "please say" not in asked(request) else "###DONE###"

    engine.reply = reply
    mesh = await start_mesh([engine], env=[{"id": "user-sim+mesh_quiz", "name": "quiz"}], seq_len=4096)
    [rollout] = await mesh.played(make_group(environment="quiz", deadline_s=120.0))
    assert (rollout.agent, rollout.reward, rollout.num_turns) == ("assistant", 1.0, 1)
    assert rollout.metrics["user_turns"] == 2.0
    assert rollout.completion == "cat"


@pytest.mark.parametrize("pool", [{"type": "elastic", "multiplex": 1}, {"type": "static", "servers": [{}, {}]}])
async def test_rollouts_share_several_interception_servers(start_mesh, make_group, engine, pool):
    mesh = await start_mesh([engine], env=[{"id": "mesh_echo", "args": {"interception": pool}}])
    assert [rollout.completion for rollout in await mesh.played(make_group(group_size=3))] == ["cat"] * 3


async def test_a_secret_that_no_rollout_has_is_refused():
    async with InterceptionServer() as server:
        with pytest.raises(InterceptionError, match="the rollout has ended"):
            await InterceptionCalls(server).post("/v1/chat/completions", "nobody's", b"{}")


async def test_best_of_n_makes_a_rollout_of_each_attempt(start_mesh, make_group, engine):
    replies = iter(["cat", "dog", "cow"])
    engine.reply = lambda request: next(replies)
    mesh = await start_mesh([engine], env=[{"id": "best-of-n+mesh_quiz", "name": "quiz", "args": {"n": 3}}])
    rollouts = await mesh.played(make_group(environment="quiz", deadline_s=120.0))
    assert [(rollout.reward, rollout.metrics["best"]) for rollout in rollouts] == [(1.0, 1.0), (0.0, 0.0), (0.0, 0.0)]
    assert {rollout.metrics["pass_at_n"] for rollout in rollouts} == {1.0}


@pytest.fixture
async def judge() -> AsyncIterator[tuple[str, list[tuple[str, Any]]]]:
    """An OpenAI-compatible server that answers yes where the response is "cat"."""
    bodies: list[tuple[str, Any]] = []

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        bodies.append((request.headers["Authorization"], body))
        said = "yes" if "Response:\n```\ncat" in body["messages"][0]["content"] else "no"
        return chat_answer(body, {"content": said})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    async with serving_http(app) as url:
        yield f"{url}/v1", bodies


async def test_a_judge_behind_any_openai_endpoint_gives_a_reward(start_mesh, make_group, engine, judge, monkeypatch):
    url, bodies = judge
    monkeypatch.setenv("MESH_JUDGE_KEY", "sesame")
    entry = {"id": "reference", "base_url": url, "model": "judge-1", "api_key_var": "MESH_JUDGE_KEY", "weight": 0.5}
    replies = iter(["cat", "dog"])
    engine.reply = lambda request: next(replies)
    mesh = await start_mesh([engine], env=[{"id": "mesh_quiz", "args": {"task": {"judges": [entry]}}}])
    rollouts = await mesh.played(make_group(environment="mesh_quiz", group_size=2, deadline_s=120.0))
    assert sorted(rollout.reward_parts["reference"] for rollout in rollouts) == [0.0, 0.5]
    assert sorted(rollout.reward for rollout in rollouts) == [0.0, 1.5]
    assert [(key, body["model"]) for key, body in bodies] == [("Bearer sesame", "judge-1")] * 2
