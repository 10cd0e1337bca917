"""The trainer's loss section becomes the objective that it describes; a key of another loss is an error."""

import pytest
import torch
from pydantic import ValidationError

from meshrl.algorithms.losses import LossInputs
from meshrl.algorithms.objective import Normaliser
from meshrl.trainer.loss_config import NORMALISERS, LossConfig
from meshrl.trainer.objectives import build_objective

RATIO = 1.5


def loss_at(config: LossConfig, *, ratio: float = RATIO, advantage: float = 1.0) -> tuple[float, bool]:
    """Value and mask of one token of probability 0.5."""
    logprobs = torch.tensor([0.5]).log()
    output = build_objective(config).loss(
        LossInputs(
            logprobs=logprobs,
            inference_logprobs=logprobs - torch.tensor([ratio]).log(),
            advantages=torch.tensor([advantage]),
            sequence_ids=torch.zeros(1, dtype=torch.int64),
            num_sequences=1,
        )
    )
    return output.per_token.item(), bool(output.masked.item())


def refusal(**values: object) -> str:
    with pytest.raises(ValidationError) as raised:
        LossConfig.model_validate(values)
    return str(raised.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, -RATIO + 1e-3 * 0.4055**2),
        ({"adv_tau": 2.0, "kl_tau": 0.0}, -2 * RATIO),
        ({"type": "aipo"}, -RATIO * -0.6931),
        ({"type": "aipo", "delta": 1.25}, -1.25 * -0.6931),
        ({"type": "grpo"}, -1.2),
        ({"type": "grpo", "clip_high": 0.28}, -1.28),
        ({"type": "gspo"}, -1.0004),
        ({"type": "cispo"}, -RATIO * -0.6931),
        ({"type": "cispo", "clip_high": 0.1}, -1.1 * -0.6931),
    ],
)
def test_constants_reach_the_loss(values: dict[str, object], expected: float) -> None:
    assert loss_at(LossConfig.model_validate(values))[0] == pytest.approx(expected, abs=1e-4)


def test_bounds_are_not_mixed_up() -> None:
    low = LossConfig(type="grpo", clip_low=0.3, clip_high=0.6)
    assert loss_at(low, ratio=0.5, advantage=-1.0) == (pytest.approx(0.7), True)
    assert loss_at(LossConfig(type="cispo", clip_low=0.3), ratio=0.5)[0] == pytest.approx(0.7 * 0.6931, abs=1e-4)
    assert loss_at(LossConfig(type="cispo"), ratio=0.5)[0] == pytest.approx(0.5 * 0.6931, abs=1e-4)
    rises = {"ratio": RATIO, "advantage": 1.0}  # by 0.167, from a third to a half
    assert loss_at(LossConfig(dppo_mask_high=0.1, dppo_mask_low=0.9), **rises)[1]
    assert not loss_at(LossConfig(dppo_mask_high=0.9, dppo_mask_low=0.1), **rises)[1]


@pytest.mark.parametrize("loss", sorted(NORMALISERS))
def test_each_loss_has_the_normaliser_of_its_paper_until_told_otherwise(loss: str) -> None:
    how = {"import_path": "custom_functions.importance_weighted"} if loss == "custom" else {}
    built = build_objective(LossConfig.model_validate({"type": loss, **how}))
    assert built.normaliser.value == {"grpo": "sequence", "gspo": "sequence"}.get(loss, "token")
    fixed = LossConfig.model_validate({"type": loss, "normaliser": "fixed", "fixed_length": 7, **how})
    assert (build_objective(fixed).normaliser, build_objective(fixed).fixed_length) == (Normaliser.FIXED, 7)


def test_the_reference_term_has_its_constants() -> None:
    built = build_objective(LossConfig(ref_kl_tau=0.04, ref_kl_delta=2.0))
    assert (built.ref_kl_tau, built.ref_kl_delta) == (0.04, 2.0)


def test_a_key_of_another_loss_is_an_error_even_when_it_is_zero() -> None:
    message = refusal(type="grpo", kl_tau=0.0)
    assert "loss.kl_tau belongs to loss.type default, not to grpo; leave it out (keys of grpo: clip_low" in message
    assert "loss.clip_high belongs to loss.type grpo or gspo or cispo, not to default" in refusal(clip_high=0.2)
    assert "loss.kwargs belongs to loss.type custom, not to aipo" in refusal(type="aipo", kwargs={"a": 1})


def test_a_custom_loss_needs_its_function() -> None:
    assert "loss.type custom needs loss.import_path" in refusal(type="custom")
    with pytest.raises(ValueError, match=r"loss\.import_path 'no\.such\.loss': cannot import"):
        build_objective(LossConfig(type="custom", import_path="no.such.loss"))


def test_a_fixed_length_goes_with_its_normaliser() -> None:
    assert "loss.fixed_length goes with loss.normaliser fixed" in refusal(normaliser="fixed")
    assert "got 5 with token; set both or neither" in refusal(fixed_length=5)
    assert "got 5 with sequence" in refusal(type="gspo", fixed_length=5)
