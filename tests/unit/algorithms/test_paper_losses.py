"""The losses beside their papers' formulas in plain Python, and by finite differences of those."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshrl.algorithms.losses import (
    LossInputs,
    LossOutput,
    aipo_loss,
    cispo_loss,
    cross_entropy_loss,
    dppo_kl_loss,
    grpo_loss,
    gspo_loss,
)
from paper_losses import PAPERS, Tokens, columns_of, near_sequences

LOSSES: dict[str, Callable[..., LossOutput]] = {
    "dppo": dppo_kl_loss,
    "aipo": aipo_loss,
    "grpo": grpo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "ce": cross_entropy_loss,
}
STEP = 1e-6


def far_tokens() -> list[Tokens]:
    """Tokens far from the policy that sampled them, one a sequence."""
    rng = random.Random(0)
    tokens = [(-0.05, -1.5, 1.0), (-1.5, -0.05, -1.0), (-0.05, -1.5, -1.0), (-1.5, -0.05, 1.0), (-2.0, -2.0, 0.0)]
    tokens += [(-rng.expovariate(1.0), -rng.expovariate(1.0), rng.gauss(0.0, 1.0)) for _ in range(19)]
    return [[token] for token in tokens]


CASES: dict[str, tuple[str, dict[str, float], list[Tokens]]] = {
    "dppo_kl": ("dppo", {"mask_low": 0.2, "mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3}, far_tokens()),
    "dppo_kl_uneven": ("dppo", {"mask_low": 0.1, "mask_high": 0.4, "adv_tau": 0.5, "kl_tau": 0.1}, far_tokens()),
    "aipo": ("aipo", {"delta": 4.0}, far_tokens()),
    "aipo_tight": ("aipo", {"delta": 1.05}, far_tokens()),
    "grpo": ("grpo", {"clip_low": 0.2, "clip_high": 0.2}, far_tokens()),
    "grpo_clip_higher": ("grpo", {"clip_low": 0.2, "clip_high": 0.28}, near_sequences()),
    "gspo": ("gspo", {"clip_low": 0.05, "clip_high": 0.1}, near_sequences()),
    "gspo_paper": ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, near_sequences()),
    "cispo": ("cispo", {"clip_high": 0.28}, far_tokens()),
    "cispo_both": ("cispo", {"clip_high": 0.28, "clip_low": 0.2}, far_tokens()),
    "ce": ("ce", {}, near_sequences()),
}


def inputs_of(sequences: list[Tokens], dtype: torch.dtype = torch.float64) -> LossInputs:
    logprobs, sampled, advantages = (
        torch.tensor(column, dtype=dtype) for column in columns_of([token for tokens in sequences for token in tokens])
    )
    lengths = torch.tensor([len(tokens) for tokens in sequences])
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        inference_logprobs=sampled,
        advantages=advantages,
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        num_sequences=len(lengths),
    )


def gradient_of(inputs: LossInputs, output: LossOutput) -> list[float]:
    (gradient,) = torch.autograd.grad(output.per_token.sum(), inputs.logprobs)
    values: list[float] = gradient.tolist()
    return values


@pytest.mark.parametrize(
    ("dtype", "within"),
    [(torch.float64, {"abs": 1e-12}), (torch.float32, {"rel": 2e-6, "abs": 2e-6})],
    ids=["float64", "float32"],
)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_the_papers(name: str, dtype: torch.dtype, within: dict[str, Any]) -> None:
    loss, parameters, sequences = CASES[name]
    paper = PAPERS[loss]
    per_token, gradient, masked = list[float](), list[float](), list[bool]()
    for logp, logq, adv in map(columns_of, sequences):
        per_token += paper.values(logp, logq, adv, logp, **parameters)
        gradient += [sum(column) for column in zip(*paper.jacobian(logp, logq, adv, **parameters), strict=True)]
        masked += paper.masked(logp, logq, adv, **parameters)
    inputs = inputs_of(sequences, dtype)
    output = LOSSES[loss](inputs, **parameters)
    assert output.per_token.dtype == dtype
    assert output.per_token.tolist() == pytest.approx(per_token, **within)
    assert gradient_of(inputs, output) == pytest.approx(gradient, **within)
    assert output.masked.tolist() == masked
    if name in ("dppo_kl", "grpo", "gspo"):  # tokens of both signs are masked and kept
        seen = {(adv > 0, stopped) for adv, stopped in zip(inputs.advantages.tolist(), masked, strict=True) if adv}
        assert seen == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize("name", CASES)
def test_gradient_matches_finite_differences_of_the_paper(name: str) -> None:
    """The paper's stop-gradients stay where they were."""
    loss, parameters, sequences = CASES[name]
    slopes = []
    for logp, logq, adv in map(columns_of, sequences):
        for at in range(len(logp)):
            sums = []
            for step in (STEP, -STEP):
                moved = list(logp)
                moved[at] += step
                sums.append(math.fsum(PAPERS[loss].values(moved, logq, adv, logp, **parameters)))
            slopes.append((sums[0] - sums[1]) / (2 * STEP))
    inputs = inputs_of(sequences)
    output = LOSSES[loss](inputs, **parameters)
    assert gradient_of(inputs, output) == pytest.approx(slopes, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("dppo", {"mask_low": 0.2, "mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3}),
        ("aipo", {"delta": 4.0}),
        ("grpo", {"clip_low": 0.2, "clip_high": 0.28}),
        ("cispo", {"clip_low": 0.2, "clip_high": 0.28}),
    ],
)
def test_on_policy_gradient_is_the_plain_policy_gradient(name: str, constants: dict[str, float]) -> None:
    inputs = inputs_of([[(-0.1, -0.1, 1.0), (-1.0, -1.0, -0.5), (-3.0, -3.0, 0.25)]])
    assert gradient_of(inputs, LOSSES[name](inputs, **constants)) == [-1.0, 0.5, -0.25]


def test_gspo_on_policy_gradient_shares_the_advantage_over_the_sequence() -> None:
    inputs = inputs_of([[(-0.1, -0.1, 1.0), (-1.0, -1.0, 1.0)], [(-3.0, -3.0, -2.0)]])
    output = gspo_loss(inputs, clip_low=3e-4, clip_high=4e-4)
    assert output.per_token.tolist() == [-1.0, -1.0, 2.0]
    assert gradient_of(inputs, output) == [-1.0, -1.0, 2.0]  # of the sum; the SEQUENCE normaliser halves the first two


def test_cross_entropy_is_minus_logprob_and_ignores_advantages() -> None:
    inputs = inputs_of([[(-0.1, math.nan, math.nan), (-1.0, math.nan, math.nan)]])
    assert cross_entropy_loss(inputs).per_token.tolist() == pytest.approx([0.1, 1.0])


def test_metrics_say_how_many_tokens_were_clipped_on_each_side() -> None:
    inputs = inputs_of([[(-1.0, -2.0, 1.0)], [(-1.0, -0.5, -1.0)], [(-1.0, -1.0, 1.0)], [(-1.0, -2.0, -1.0)]])
    # r = e, e^-0.5, 1, e
    surrogate = grpo_loss(inputs, clip_low=0.2, clip_high=0.2).metrics
    assert surrogate["ratio"].tolist() == pytest.approx([math.e, math.exp(-0.5), 1.0, math.e])
    assert surrogate["clip_high_fraction"].tolist() == [1.0, 0.0, 0.0, 0.0]  # the last lowers p: nothing stops it
    assert surrogate["clip_low_fraction"].tolist() == [0.0, 1.0, 0.0, 0.0]
    weights = cispo_loss(inputs, clip_low=0.2, clip_high=0.2).metrics
    assert weights["clip_high_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert weights["clip_low_fraction"].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert aipo_loss(inputs, delta=2.0).metrics["clip_high_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0]
