import json
from pathlib import Path

import pytest
import torch

from meshrl.algorithms.losses import LossInputs, aipo_loss, cross_entropy_loss, dppo_kl_loss

FILES = sorted(Path(__file__).parent.glob("*.json"))
LOSSES = {"dppo": dppo_kl_loss, "aipo": aipo_loss}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_loss_and_gradient_match_the_golden_file(file: Path) -> None:
    golden = json.loads(file.read_text())
    logprobs = torch.tensor(golden["logprobs"], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        inference_logprobs=torch.tensor(golden["inference_logprobs"], dtype=torch.float64),
        advantages=torch.tensor(golden["advantages"], dtype=torch.float64),
    )
    output = LOSSES[golden["loss"]](inputs, **golden["parameters"])
    output.per_token.sum().backward()
    assert output.per_token.tolist() == pytest.approx(golden["per_token"], abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(golden["gradient"], abs=1e-12)
    assert output.masked.tolist() == golden["masked"]


def test_golden_files_cover_masked_and_kept_tokens_of_both_signs() -> None:
    golden = json.loads((Path(__file__).parent / "dppo_kl.json").read_text())
    seen = {(adv > 0, masked) for adv, masked in zip(golden["advantages"], golden["masked"], strict=True) if adv}
    assert seen == {(True, True), (True, False), (False, True), (False, False)}


def test_on_policy_gradient_of_both_losses_is_plain_policy_gradient() -> None:
    advantages = torch.tensor([1.0, -0.5, 0.25])
    gradients = []
    for loss in (
        lambda inputs: dppo_kl_loss(inputs, mask_low=0.2, mask_high=0.2, adv_tau=1.0, kl_tau=1e-3),
        lambda inputs: aipo_loss(inputs, delta=4.0),
    ):
        logprobs = torch.tensor([-0.1, -1.0, -3.0], requires_grad=True)
        inputs = LossInputs(logprobs=logprobs, inference_logprobs=logprobs.detach(), advantages=advantages)
        loss(inputs).per_token.sum().backward()
        gradients.append(logprobs.grad)
    for gradient in gradients:
        torch.testing.assert_close(gradient, -advantages)


def test_cross_entropy_is_minus_logprob_and_ignores_advantages() -> None:
    logprobs = torch.tensor([-0.1, -1.0])
    nan = torch.full((2,), float("nan"))
    output = cross_entropy_loss(LossInputs(logprobs=logprobs, inference_logprobs=nan, advantages=nan))
    assert output.per_token.tolist() == pytest.approx([0.1, 1.0])
