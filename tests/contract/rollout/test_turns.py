"""What ends a conversation early, and what does not."""

from __future__ import annotations

import pytest
from aiohttp import web

GUESS = [{"id": "mesh_guess"}]
"""Three turns."""


async def test_the_last_turn_that_is_allowed_ends_the_conversation(start_mesh, engine, make_group):
    mesh = await start_mesh([engine], env=GUESS, max_turns=2)
    [rollout] = await mesh.played(make_group(environment="mesh_guess"))
    assert (rollout.num_turns, rollout.truncated, len(engine.requests)) == (2, True, 2)


async def test_an_empty_reply_does_not_break_the_conversation(start_mesh, engine, make_group):
    engine.reply = lambda request: "" if len(engine.requests) == 1 else "x"
    mesh = await start_mesh([engine], env=GUESS)
    [rollout] = await mesh.played(make_group(environment="mesh_guess"))
    assert (rollout.num_turns, rollout.truncated, len(rollout.samples)) == (3, False, 1)


async def test_a_conversation_that_outgrows_the_context_is_scored_as_it_stands(start_mesh, engine, make_group):
    engine.reply = lambda request: "a long reply"
    mesh = await start_mesh([engine], env=GUESS, seq_len=60)
    [rollout] = await mesh.played(make_group(environment="mesh_guess"))
    assert rollout.truncated
    assert 1 < rollout.num_turns < 3
    assert max(len(sample.token_ids) for sample in rollout.samples) <= 60
    assert rollout.reward == pytest.approx(rollout.num_turns / 3)


@pytest.mark.parametrize("status", [400, 500])
async def test_an_engine_that_refuses_a_call_fails_the_rollout(start_mesh, engine, make_group, status):
    engine.on_call = lambda request, body: web.Response(status=status, text="no")
    mesh = await start_mesh([engine])
    failure, _ = await mesh.collect(make_group())
    assert engine.url in failure.message
