"""Turns taken inside the process have the outcome that they have over HTTP."""

from __future__ import annotations

import dataclasses
import uuid

import numpy as np
import pytest
from aiohttp import web

from meshrl.rollout.engines import model_client
from meshrl.wire.types import Rollout, RolloutFailure, Sampling

FREE = {"rollout_id", "episode_id", "timings_s", "start_time", "end_time", "traceparent", "group_id"}


def plain(event: Rollout | RolloutFailure) -> dict:
    """What an event says, but for what is drawn or measured anew each time."""
    fields = {name: value for name, value in vars(event).items() if name not in FREE}
    if isinstance(event, Rollout):
        fields["samples"] = [
            {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(sample).items()}
            for sample in event.samples
        ]
    return fields


async def both_ways(start_mesh, engine, monkeypatch, request, **options) -> tuple[list, list]:
    """The events and the engine's requests of one group, played in the process and then over HTTP."""
    seen = []
    for number, direct in enumerate((True, False)):
        with monkeypatch.context() as patch:
            if not direct:
                patch.setattr(model_client, "plays_in_process", lambda session: False)
            engine.requests.clear()
            mesh = await start_mesh([engine], **options)
            asked = dataclasses.replace(request, request_id=str(uuid.uuid4()), group_id=f"group-{number}")
            events = await mesh.collect(asked)
            seen.append(([plain(event) for event in events[:-1]], list(engine.requests)))
    return tuple(seen)


@pytest.mark.parametrize("max_turns", [None, 2])
async def test_a_conversation_of_three_turns(start_mesh, engine, make_group, monkeypatch, max_turns):
    engine.reply = lambda request: f"reply {len(engine.requests)}"
    request = make_group(environment="mesh_guess", sampling=Sampling(seed=7))
    options = {"env": [{"id": "mesh_guess"}], "max_turns": max_turns}
    direct, over_http = await both_ways(start_mesh, engine, monkeypatch, request, **options)
    assert direct == over_http
    ((rollout,), requests) = direct
    assert rollout["num_turns"] == (max_turns or 3) == len(requests)
    assert rollout["truncated"] == (max_turns is not None)


async def test_an_empty_reply_does_not_break_the_conversation(start_mesh, engine, make_group, monkeypatch):
    engine.reply = lambda request: "" if len(engine.requests) == 1 else "x"
    request = make_group(environment="mesh_guess", sampling=Sampling(seed=7))
    direct, over_http = await both_ways(start_mesh, engine, monkeypatch, request, env=[{"id": "mesh_guess"}])
    assert direct == over_http
    assert direct[0][0]["num_turns"] == 3


async def test_a_conversation_that_outgrows_the_context_is_scored_as_it_stands(
    start_mesh, engine, make_group, monkeypatch
):
    engine.reply = lambda request: "a long reply"
    request = make_group(environment="mesh_guess", sampling=Sampling(seed=7))
    options = {"env": [{"id": "mesh_guess"}], "seq_len": 60}
    direct, over_http = await both_ways(start_mesh, engine, monkeypatch, request, **options)
    assert direct == over_http
    ((rollout,), _) = direct
    assert rollout["truncated"]
    assert 1 < rollout["num_turns"] < 3
    assert max(len(sample["token_ids"]) for sample in rollout["samples"]) <= 60
    assert rollout["reward"] == pytest.approx(rollout["num_turns"] / 3)


@pytest.mark.parametrize("status", [400, 500])
async def test_an_engine_that_refuses_a_call_fails_the_rollout(start_mesh, engine, make_group, monkeypatch, status):
    engine.on_call = lambda request, body: web.Response(status=status, text="no")
    request = make_group(sampling=Sampling(seed=7))
    direct, over_http = await both_ways(start_mesh, engine, monkeypatch, request)
    for (events, _), url in ((direct, engine.url), (over_http, engine.url)):
        (failure,) = events
        assert url in failure["message"]
    assert direct == over_http


async def test_a_broken_reward_is_told_the_same(start_mesh, engine, make_group, monkeypatch):
    options = {"env": [{"id": "mesh_echo", "args": {"break_reward": True}}]}
    direct, over_http = await both_ways(start_mesh, engine, monkeypatch, make_group(), **options)
    assert direct == over_http
    assert "this reward is broken" in direct[0][0]["message"]
