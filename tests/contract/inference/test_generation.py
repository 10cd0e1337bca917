"""What an engine samples, and the logprobs it reports, are those of a plain forward pass."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import pytest
import torch

from engine_mesh import MAX_MODEL_LEN, EngineClient, EngineMesh, logprobs_of, reference
from plain_checks import check_greedy, check_logprobs
from plain_model import at, greedy_loop, logits_of, processed_logprobs, reweighted

PROMPTS = ([5], [1, 2, 3], [7] * 20, [*range(1, 64)] * 5)
CUTS: dict[str, dict[str, Any]] = {
    "all": {},
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all cuts": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)} tokens")
async def test_greedy_tokens_are_the_most_likely_ones(
    mesh: EngineMesh, client: EngineClient, prompt: list[int]
) -> None:
    choice = await client.greedy(prompt)
    assert len(choice["token_ids"]) == 40
    assert choice["finish_reason"] == "length"
    assert choice["version_spans"] == [[0, 40, mesh.version]]
    check_greedy(mesh.kind, logits_of(reference(mesh), prompt, choice["token_ids"]), choice)


async def test_greedy_tokens_are_those_of_a_plain_loop(mesh: EngineMesh, client: EngineClient) -> None:
    expected = greedy_loop(reference(mesh), [1, 2, 3], 40)
    found = (await client.greedy([1, 2, 3]))["token_ids"]
    same = next((at for at, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), 40)
    if same < 40:  # only where the plain loop itself had to choose between two that are nearly alike
        best, second = logits_of(reference(mesh), [1, 2, 3], expected)[same].topk(2).values.tolist()
        assert best - second <= mesh.kind.clear_margin


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
async def test_logprobs_are_of_the_distribution_sampled_from(
    mesh: EngineMesh, client: EngineClient, cut: dict[str, Any]
) -> None:
    how = {"temperature": 0.7, **cut}
    choices = await client.generate([3, 1, 4], n=4, seed=11, max_tokens=60, **how)
    for choice in choices:
        logits = logits_of(reference(mesh), [3, 1, 4], choice["token_ids"])
        check_logprobs(mesh.kind, logits, choice, how)


async def test_penalties_and_biases_change_the_distribution_that_is_sampled_and_reported(
    mesh: EngineMesh, client: EngineClient
) -> None:
    weights = {
        "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3,
        "logit_bias": {"7": 4.0, "9": -90},
    }  # fmt: skip
    prompt, how = [3, 1, 4, 1], {"temperature": 0.7, "top_p": 0.9}
    greedy, sampled, plain = await asyncio.gather(
        client.one(prompt, max_tokens=30, temperature=0.0, ignore_eos=True, **weights),
        client.generate(prompt, n=3, seed=11, max_tokens=40, ignore_eos=True, **how, **weights),
        client.greedy(prompt),  # beside them, in the same steps
    )

    def expected(choice: dict[str, Any]) -> torch.Tensor:
        tokens = choice["token_ids"]
        return reweighted(logits_of(reference(mesh), prompt, tokens), prompt, tokens, **weights)

    check_greedy(mesh.kind, expected(greedy), greedy)
    for choice in sampled:
        check_logprobs(mesh.kind, expected(choice), choice, how)
        assert 9 not in choice["token_ids"]
    check_greedy(mesh.kind, logits_of(reference(mesh), prompt, plain["token_ids"]), plain)
    assert greedy["token_ids"] != plain["token_ids"][:30]


async def test_packed_logprobs_are_the_same_numbers(client: EngineClient) -> None:
    plain = await client.one([1, 2, 3], seed=5)
    packed = await client.one([1, 2, 3], seed=5, extra_args={"packed_logprobs": True})
    assert packed["logprobs"] is None
    assert packed["completion_logprobs"] == plain["completion_logprobs"]


async def test_alternatives_are_the_likeliest_tokens(mesh: EngineMesh, client: EngineClient) -> None:
    choice = await client.one([9, 8, 7], temperature=0.0, logprobs=3, max_tokens=10)
    logprobs = processed_logprobs(logits_of(reference(mesh), [9, 8, 7], choice["token_ids"]))
    for position, entry in enumerate(choice["logprobs"]["content"]):
        found = [top["logprob"] for top in entry["top_logprobs"]]
        expected = logprobs[position].topk(3).values.tolist()
        assert found == pytest.approx(expected, abs=mesh.kind.logprob_atol)
        tokens = [int(top["token"].removeprefix("token_id:")) for top in entry["top_logprobs"]]
        assert at(logprobs[[position] * 3], tokens) == pytest.approx(found, abs=mesh.kind.logprob_atol)


async def test_tokens_are_drawn_as_often_as_they_are_likely(mesh: EngineMesh, client: EngineClient) -> None:
    draws = 1024
    counts: Counter[int] = Counter()
    for seed in range(draws // 128):
        choices = await client.generate([4, 4], n=128, seed=seed, max_tokens=1, temperature=0.7, top_k=6)
        counts.update(choice["token_ids"][0] for choice in choices)
    probs = processed_logprobs(logits_of(reference(mesh), [4, 4], [0]), temperature=0.7, top_k=6).exp()[0]
    assert sum(probs[token] == 0.0 for token in counts) == 0
    for token in probs.nonzero()[:, 0].tolist():
        likely = probs[token].item()
        allowed = 5 * math.sqrt(likely * (1 - likely) / draws) + mesh.kind.logprob_atol * likely
        assert counts[token] / draws == pytest.approx(likely, abs=allowed)


async def test_same_seed_gives_same_tokens_and_another_seed_others(client: EngineClient) -> None:
    first, again, other = [await client.one([1, 2, 3], seed=seed) for seed in (7, 7, 8)]
    assert first["token_ids"] == again["token_ids"]
    assert logprobs_of(first) == logprobs_of(again)
    assert first["token_ids"] != other["token_ids"]


async def test_without_a_seed_no_two_completions_are_alike(client: EngineClient) -> None:
    found = [tuple((await client.one([1, 2, 3]))["token_ids"]) for _ in range(3)]
    assert len(set(found)) == 3


async def test_completions_of_one_request_differ_and_repeat_with_its_seed(client: EngineClient) -> None:
    first, again = [await client.generate([1, 2, 3], n=4, seed=7) for _ in range(2)]
    assert len({tuple(choice["token_ids"]) for choice in first}) == 4
    assert [choice["token_ids"] for choice in first] == [choice["token_ids"] for choice in again]


async def test_prompts_of_any_length_and_context_are_filled(mesh: EngineMesh, client: EngineClient) -> None:
    longest = [1 + index % 63 for index in range(MAX_MODEL_LEN - 1)]
    choice = await client.one(longest, temperature=0.0, max_tokens=500)
    assert len(choice["token_ids"]) == 1
    assert choice["finish_reason"] == "length"
    check_greedy(mesh.kind, logits_of(reference(mesh), longest, choice["token_ids"]), choice)


async def test_a_model_name_is_not_asked_for(client: EngineClient) -> None:
    choices = await client.generate([1, 2, 3], extra={"model": "another"}, max_tokens=2)
    assert len(choices[0]["token_ids"]) == 2


async def test_prompt_logprobs_are_those_of_a_plain_forward_pass_or_refused(
    mesh: EngineMesh, client: EngineClient
) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 4}
    answer = await client.post("/inference/v1/generate", {"token_ids": [9, 8, 7, 6], "sampling_params": sampling})
    if answer.status == 400:
        assert "prompt_logprobs" in answer.message
        return
    assert answer.status == 200, answer.body
    assert answer.body["choices"][0]["token_ids"] == (await client.greedy([9, 8, 7, 6], 5))["token_ids"]
    first, *entries = answer.body["prompt_logprobs"]
    assert first is None
    logprobs_TV = processed_logprobs(logits_of(reference(mesh), [9], [8, 7, 6]))
    expected = at(logprobs_TV, [8, 7, 6])
    found = [entry[str(token)]["logprob"] for entry, token in zip(entries, [8, 7, 6], strict=True)]
    assert found == pytest.approx(expected, abs=mesh.kind.logprob_atol)
    for entry, logprobs_V in zip(entries, logprobs_TV, strict=True):  # the four likeliest are there, too
        likeliest = sorted((said["logprob"] for said in entry.values()), reverse=True)[:4]
        assert likeliest == pytest.approx(sorted(logprobs_V.tolist(), reverse=True)[:4], abs=mesh.kind.logprob_atol)
