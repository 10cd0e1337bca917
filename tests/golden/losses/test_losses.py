import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paper_losses
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

FILES = sorted(Path(__file__).parent.glob("*.json"))
LOSSES: dict[str, Callable[..., LossOutput]] = {
    "dppo": dppo_kl_loss,
    "aipo": aipo_loss,
    "grpo": grpo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "ce": cross_entropy_loss,
}
STEP = 1e-6


def inputs_of(golden: dict[str, Any], dtype: torch.dtype = torch.float64) -> LossInputs:
    lengths = torch.tensor(golden["lengths"])
    return LossInputs(
        logprobs=torch.tensor(golden["logprobs"], dtype=dtype, requires_grad=True),
        inference_logprobs=torch.tensor(golden["inference_logprobs"], dtype=dtype),
        advantages=torch.tensor(golden["advantages"], dtype=dtype),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        num_sequences=len(lengths),
    )


def gradient_of(inputs: LossInputs, output: LossOutput) -> list[float]:
    (gradient,) = torch.autograd.grad(output.per_token.sum(), inputs.logprobs)
    values: list[float] = gradient.tolist()
    return values


def finite_differences(golden: dict[str, Any]) -> list[float]:
    """Of the paper's loss, whose stop-gradients stay where they were."""
    values = paper_losses.PAPERS[golden["loss"]].values
    slopes = []
    start = 0
    for length in golden["lengths"]:
        of = slice(start, start + length)
        logq, adv, fixed = (golden[key][of] for key in ("inference_logprobs", "advantages", "logprobs"))
        for at in range(length):
            sums = []
            for step in (STEP, -STEP):
                moved = list(fixed)
                moved[at] += step
                sums.append(math.fsum(values(moved, logq, adv, fixed, **golden["parameters"])))
            slopes.append((sums[0] - sums[1]) / (2 * STEP))
        start += length
    return slopes


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_loss_and_gradient_match_the_golden_file(file: Path) -> None:
    golden = json.loads(file.read_text())
    inputs = inputs_of(golden)
    output = LOSSES[golden["loss"]](inputs, **golden["parameters"])
    assert output.per_token.tolist() == pytest.approx(golden["per_token"], abs=1e-12)
    assert gradient_of(inputs, output) == pytest.approx(golden["gradient"], abs=1e-12)
    assert output.masked.tolist() == golden["masked"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_gradient_matches_finite_differences_of_the_paper(file: Path) -> None:
    golden = json.loads(file.read_text())
    inputs = inputs_of(golden)
    output = LOSSES[golden["loss"]](inputs, **golden["parameters"])
    assert gradient_of(inputs, output) == pytest.approx(finite_differences(golden), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_float32_is_close_to_the_golden_file(file: Path) -> None:
    golden = json.loads(file.read_text())
    inputs = inputs_of(golden, torch.float32)
    output = LOSSES[golden["loss"]](inputs, **golden["parameters"])
    assert output.per_token.dtype == torch.float32
    assert output.per_token.tolist() == pytest.approx(golden["per_token"], rel=2e-6, abs=2e-6)
    assert gradient_of(inputs, output) == pytest.approx(golden["gradient"], rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("name", ["dppo_kl", "grpo", "gspo"])
def test_golden_files_cover_masked_and_kept_tokens_of_both_signs(name: str) -> None:
    golden = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    seen = {(adv > 0, masked) for adv, masked in zip(golden["advantages"], golden["masked"], strict=True) if adv}
    assert seen == {(True, True), (True, False), (False, True), (False, False)}


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
    on_policy = {"lengths": [3], "logprobs": [-0.1, -1.0, -3.0], "inference_logprobs": [-0.1, -1.0, -3.0]}
    inputs = inputs_of({**on_policy, "advantages": [1.0, -0.5, 0.25]})
    assert gradient_of(inputs, LOSSES[name](inputs, **constants)) == [-1.0, 0.5, -0.25]


def test_gspo_on_policy_gradient_shares_the_advantage_over_the_sequence() -> None:
    on_policy = {"lengths": [2, 1], "logprobs": [-0.1, -1.0, -3.0], "inference_logprobs": [-0.1, -1.0, -3.0]}
    inputs = inputs_of({**on_policy, "advantages": [1.0, 1.0, -2.0]})
    output = gspo_loss(inputs, clip_low=3e-4, clip_high=4e-4)
    assert output.per_token.tolist() == [-1.0, -1.0, 2.0]
    assert gradient_of(inputs, output) == [-1.0, -1.0, 2.0]  # of the sum; the SEQUENCE normaliser halves the first two


def test_cross_entropy_is_minus_logprob_and_ignores_advantages() -> None:
    nan = [float("nan")] * 2
    inputs = inputs_of({"lengths": [2], "logprobs": [-0.1, -1.0], "inference_logprobs": nan, "advantages": nan})
    assert cross_entropy_loss(inputs).per_token.tolist() == pytest.approx([0.1, 1.0])


def test_metrics_say_how_many_tokens_were_clipped_on_each_side() -> None:
    tokens = {"logprobs": [-1.0] * 4, "inference_logprobs": [-2.0, -0.5, -1.0, -2.0], "lengths": [1] * 4}
    inputs = inputs_of({**tokens, "advantages": [1.0, -1.0, 1.0, -1.0]})  # r = e, e^-0.5, 1, e
    surrogate = grpo_loss(inputs, clip_low=0.2, clip_high=0.2).metrics
    assert surrogate["ratio"].tolist() == pytest.approx([math.e, math.exp(-0.5), 1.0, math.e])
    assert surrogate["clip_high_fraction"].tolist() == [1.0, 0.0, 0.0, 0.0]  # the last lowers p: nothing stops it
    assert surrogate["clip_low_fraction"].tolist() == [0.0, 1.0, 0.0, 0.0]
    weights = cispo_loss(inputs, clip_low=0.2, clip_high=0.2).metrics
    assert weights["clip_high_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert weights["clip_low_fraction"].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert aipo_loss(inputs, delta=2.0).metrics["clip_high_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0]
