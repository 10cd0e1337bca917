"""Rollouts that would make importance ratios biased are refused before a token is drawn."""

import pytest

from meshrl.wire.errors import Reason
from meshrl.wire.types import Rollout, Sampling

NEUTRAL = {"max_tokens": 16}


@pytest.mark.parametrize("mode", ["raw_logprobs", None])
async def test_sampling_that_changes_the_distribution_needs_processed_logprobs(start_mesh, make_group, engine, mode):
    engine.logprobs_mode = mode
    mesh = await start_mesh([engine], sampling=NEUTRAL)
    for sampling, named in (
        (Sampling(temperature=0.7), "temperature = 0.7"),
        (Sampling(top_p=0.9), "top_p = 0.9"),
        (Sampling(top_k=20), "top_k = 20"),
        (Sampling(min_p=0.05), "min_p = 0.05"),
    ):
        error = await mesh.refused(make_group(sampling=sampling))
        assert (error.reason, error.retryable) == (Reason.LOGPROBS_BIASED, False)
        assert f"sampling with {named} changes the distribution" in error.message
        assert f"{engine.url} ({mode or 'unknown'})" in error.message
    assert engine.requests == []


@pytest.mark.parametrize("mode", ["raw_logprobs", None])
async def test_plain_sampling_and_scores_may_come_from_any_engine(start_mesh, make_group, engine, mode):
    engine.logprobs_mode = mode
    mesh = await start_mesh([engine], sampling=NEUTRAL)
    plain, _ = await mesh.collect(make_group(sampling=Sampling(temperature=1.0, top_p=1.0)))
    scored, _ = await mesh.collect(make_group(sampling=Sampling(temperature=0.0), scores_only=True))
    assert isinstance(plain, Rollout)
    assert isinstance(scored, Rollout)


async def test_the_environments_own_sampling_counts_too(start_mesh, make_group, engine):
    engine.logprobs_mode = None
    mesh = await start_mesh([engine], sampling={**NEUTRAL, "top_p": 0.5})
    assert "top_p = 0.5" in (await mesh.refused(make_group())).message
    rollout, _ = await mesh.collect(make_group(sampling=Sampling(top_p=1.0)))
    assert isinstance(rollout, Rollout)


async def test_an_agents_own_sampling_is_found_at_its_first_call(start_mesh, make_group, engine):
    engine.logprobs_mode = "raw_logprobs"
    agent = {"agent": {"sampling": {"temperature": 0.6}}}
    mesh = await start_mesh([engine], sampling=NEUTRAL, env=[{"id": "mesh_echo", "args": agent}])
    failure, _ = await mesh.collect(make_group())
    assert (failure.reason, failure.retryable) == ("LOGPROBS_BIASED", False)
    assert "temperature = 0.6" in failure.message
    assert engine.requests == []


async def test_a_user_may_vouch_for_engines_that_say_nothing_but_not_against_what_one_says(
    start_mesh, make_group, engine, second
):
    engine.logprobs_mode, second.logprobs_mode = None, "raw_logprobs"
    client = {"logprobs_mode": "processed_logprobs"}
    mesh = await start_mesh([engine], client=client)
    rollout, _ = await mesh.collect(make_group())
    assert rollout.samples[0].temperature == pytest.approx(0.7)
    assert (await mesh.client.get_status()).engines[0].logprobs_mode == "processed_logprobs"
    mesh = await start_mesh([second], client=client)
    assert (await mesh.refused(make_group())).reason is Reason.LOGPROBS_BIASED


async def test_settings_nobody_gave_are_sent_as_neutral(start_mesh, make_group, engine):
    mesh = await start_mesh([engine], sampling=NEUTRAL)
    await mesh.collect(make_group(sampling=Sampling(top_k=3)))
    sent = engine.requests[0]["sampling_params"]
    assert {name: sent[name] for name in ("temperature", "top_p", "top_k", "min_p")} == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
    }
