"""Rollouts on the real embedded engine: what a sample says about its tokens is what the model says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inference_kit import make_model, served
from meshrl.inference.engine import HostVersion
from meshrl.models.state import hf_state
from meshrl.wire.types import RolloutSummary, Sampling
from polling import until

VOCABULARY = 99  # of the fixture's tokenizer


def rollout_model(seed: int) -> PreTrainedModel:
    return make_model(seed, vocab_size=VOCABULARY, eos_token_id=2)


@pytest.fixture
async def embedded() -> AsyncIterator[Any]:
    async with served(rollout_model(0)) as server:
        yield server


def model_logprobs(model: Any, sample: Any) -> np.ndarray:
    """(T,) logprobs of a sample's tokens by one plain forward pass; 0 where the policy sampled nothing."""
    ids_T = torch.from_numpy(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        logits_TV = model(ids_T[None]).logits[0, :-1].float() / sample.temperature
    chosen_T = logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].numpy()
    return np.where(sample.loss_mask, np.concatenate([[0.0], chosen_T]), 0.0)


def kept_tokens(probabilities_V: np.ndarray, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> np.ndarray:
    """bool (V,): the tokens that a cut leaves, by its definition over plain probabilities; one cut at a time."""
    ranked = np.argsort(-probabilities_V)
    kept = np.ones(len(probabilities_V), dtype=np.bool_)
    if min_p:
        kept &= probabilities_V >= min_p * probabilities_V.max()
    if top_k:
        kept[ranked[top_k:]] = False
    if top_p < 1.0:
        mass_before = np.cumsum(probabilities_V[ranked]) - probabilities_V[ranked]
        kept[ranked[mass_before >= top_p]] = False
    return kept


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}], ids=lambda cut: next(iter(cut)))
async def test_logprobs_of_a_cut_distribution_are_those_of_what_is_left(start_mesh, make_group, embedded, cut):
    """log of softmax(logits / 0.7), cut and renormalised, by one plain forward pass in float64."""
    mesh = await start_mesh([embedded], seq_len=256, sampling={"temperature": 0.7, "max_tokens": 24, **cut})
    *rollouts, _ = await mesh.collect(make_group(group_size=4, sampling=Sampling(seed=3)))
    assert len(rollouts) == 4
    raised = []
    for rollout in rollouts:
        (sample,) = rollout.samples
        assert sample.temperature == pytest.approx(0.7)
        ids_T = torch.from_numpy(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            full_TV = (embedded.model(ids_T[None]).logits[0].double() / sample.temperature).softmax(-1).numpy()
        for place in np.flatnonzero(sample.loss_mask):
            probabilities_V, token = full_TV[place - 1], sample.token_ids[place]
            kept_V = kept_tokens(probabilities_V, **cut)
            assert kept_V[token]
            wanted = np.log(probabilities_V[token] / probabilities_V[kept_V].sum())
            assert sample.logprobs[place] == pytest.approx(wanted, abs=1e-4)
            raised.append(wanted - np.log(probabilities_V[token]))
    assert np.mean(raised) > 0.05  # the cut took something away: without it the logprobs would be others


async def test_logprobs_and_versions_of_samples_are_those_of_the_model(start_mesh, make_group, embedded):
    env = [{"id": "mesh_echo"}, {"id": "mesh_guess", "args": {"turns": 3}}]
    mesh = await start_mesh([embedded], env=env, seq_len=256, sampling={"temperature": 0.8, "max_tokens": 12})
    events = await mesh.collect(make_group(group_size=4, min_version=0))
    events += await mesh.collect(make_group(environment="mesh_guess", group_size=4))
    rollouts = [event for event in events if hasattr(event, "samples")]
    assert len(rollouts) == 8
    for rollout in rollouts:
        for sample in rollout.samples:
            np.testing.assert_allclose(sample.logprobs, model_logprobs(embedded.model, sample), atol=1e-4)
            assert {span.version for span in sample.version_spans} == {0}
    assert sum(int(s.loss_mask.sum()) for r in rollouts for s in r.samples) == sum(
        event.sampled_tokens for event in events if isinstance(event, RolloutSummary)
    )


async def test_the_same_seed_gives_the_same_rollouts(start_mesh, make_group, embedded):
    mesh = await start_mesh([embedded], seq_len=256)
    replies = []
    for _ in range(2):
        *rollouts, _ = await mesh.collect(make_group(group_size=3, sampling=Sampling(seed=11)))
        replies.append(sorted(rollout.completion for rollout in rollouts))
    assert replies[0] == replies[1]
    assert len(set(replies[0])) == 3


async def test_tokens_before_and_after_a_weight_swap_carry_their_own_version(start_mesh, make_group, embedded):
    mesh = await start_mesh([embedded], seq_len=256, sampling={"temperature": 1.0, "max_tokens": 200})
    task = asyncio.create_task(mesh.collect(make_group(group_size=8)))
    await until(lambda: embedded.engine.in_flight >= 8)
    other = rollout_model(1)
    await embedded.engine.stage(HostVersion(version=1, tensors=hf_state(other)))
    await embedded.engine.pause()
    await embedded.engine.apply(1, b"")
    await embedded.engine.resume()
    *rollouts, _ = await task
    versions = {span.version for rollout in rollouts for sample in rollout.samples for span in sample.version_spans}
    assert versions <= {0, 1}
    assert 1 in versions
    for rollout in rollouts:
        covered = sum(span.end - span.start for span in rollout.samples[0].version_spans)
        assert covered == int(rollout.samples[0].loss_mask.sum())
