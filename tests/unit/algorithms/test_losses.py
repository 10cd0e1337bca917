import functools

import pytest
import torch

from meshrl.algorithms.losses import (
    LOG_RATIO_LIMIT,
    Loss,
    LossInputs,
    aipo_loss,
    cispo_loss,
    cross_entropy_loss,
    dppo_kl_loss,
    grpo_loss,
    gspo_loss,
    load_custom_loss,
)

LOSSES: dict[str, Loss] = {
    "default": functools.partial(dppo_kl_loss, mask_low=0.2, mask_high=0.2, adv_tau=1.0, kl_tau=1e-3),
    "aipo": functools.partial(aipo_loss, delta=4.0),
    "grpo": functools.partial(grpo_loss, clip_low=0.2, clip_high=0.28),
    "gspo": functools.partial(gspo_loss, clip_low=3e-4, clip_high=4e-4),
    "cispo": functools.partial(cispo_loss, clip_low=0.2, clip_high=0.28),
    "ce": cross_entropy_loss,
}


def inputs(
    logprobs: list[float], sampled: list[float], advantages: list[float], lengths: list[int] | None = None
) -> LossInputs:
    sizes = torch.tensor(lengths if lengths is not None else [1] * len(logprobs), dtype=torch.int64)
    return LossInputs(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        inference_logprobs=torch.tensor(sampled),
        advantages=torch.tensor(advantages),
        sequence_ids=torch.repeat_interleave(torch.arange(len(sizes)), sizes),
        num_sequences=len(sizes),
    )


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_huge_log_ratios_keep_loss_and_gradient_finite(name: str) -> None:
    far = [-1e-3, -1e-3, -1e-3, -2e4, -2e4, -2e4]
    given = inputs(far, far[::-1], [1.0, -1.0, 0.0, 1.0, -1.0, 0.0])
    output = LOSSES[name](given)
    (gradient,) = torch.autograd.grad(output.per_token.sum(), given.logprobs)
    assert torch.isfinite(output.per_token).all()
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(values).all() for values in output.metrics.values())


def test_ratio_beyond_the_limit_is_saturated_without_a_gradient() -> None:
    given = inputs([-1.0, -1.0], [-1.0 - LOG_RATIO_LIMIT - 1.0, -1.0 - LOG_RATIO_LIMIT + 1.0], [-1.0, -1.0])
    output = LOSSES["grpo"](given)
    (gradient,) = torch.autograd.grad(output.per_token.sum(), given.logprobs)
    assert output.per_token.tolist() == pytest.approx([4.8516520e8, 1.7848230e8])
    assert gradient.tolist() == pytest.approx([0.0, 1.7848230e8])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_row_without_sampled_tokens_has_an_empty_loss(name: str) -> None:
    output = LOSSES[name](inputs([], [], [], lengths=[0, 0]))
    assert output.per_token.shape == output.masked.shape == (0,)
    assert output.masked.dtype == torch.bool
    assert all(values.shape == (0,) for values in output.metrics.values())


def test_gspo_ratio_of_a_long_sequence_is_as_exact_as_its_clip_bounds_need() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(65536, generator=generator) * 0.3
    given = inputs([-20.0] * 65536, (-20.0 - noise).tolist(), [1.0] * 65536, lengths=[65536])
    exact = (given.logprobs.detach().double() - given.inference_logprobs.double()).mean().exp().item()
    loss = gspo_loss(given, clip_low=1.0, clip_high=1.0).per_token[0].item()
    assert -loss == pytest.approx(exact, abs=2e-7)


def test_custom_loss_sees_one_sequence_at_a_time_and_spreads_its_sum_over_its_tokens() -> None:
    loss = load_custom_loss("custom_functions.importance_weighted", {"scale": 2.0})
    given = inputs([-1.0, -1.0, -0.5], [-1.0, -2.0, -0.5], [1.0, 1.0, -3.0], lengths=[2, 0, 1])
    output = loss(given)
    (gradient,) = torch.autograd.grad(output.per_token.sum(), given.logprobs)
    ratio = 2.7182817
    assert output.per_token.tolist() == pytest.approx([-(1.0 + ratio), -(1.0 + ratio), 6.0])
    assert gradient.tolist() == pytest.approx([-2.0, -2.0 * ratio, 6.0])
    assert output.masked.tolist() == [False] * 3
    assert output.metrics["length"].tolist() == [2.0, 2.0, 1.0]
    assert output.metrics["ratio_max"].tolist() == pytest.approx([ratio, ratio, 1.0])


def test_custom_loss_of_a_row_without_sampled_tokens_is_empty() -> None:
    output = load_custom_loss("custom_functions:importance_weighted", {})(inputs([], [], [], lengths=[0]))
    assert output.per_token.shape == (0,)


@pytest.mark.parametrize(
    ("import_path", "kwargs", "message"),
    [
        ("loss", {}, "expected package.module.function"),
        ("no_such_package.loss", {}, "PYTHONPATH"),
        ("custom_functions.missing", {}, "has no function 'missing'"),
        ("custom_functions.NOT_A_FUNCTION", {}, "has no function"),
        ("custom_functions.importance_weighted", {"scael": 1.0}, r"loss\.kwargs"),
    ],
)
def test_a_custom_loss_that_cannot_be_called_is_refused_at_load(
    import_path: str, kwargs: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        load_custom_loss(import_path, kwargs, key="trainer.loss")
    assert "trainer.loss.import_path" in str(refusal.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("returns_a_tensor", "SequenceLoss"),
        ("forgets_to_sum", "sum it over"),
        ("reports_a_reserved_name", "rename"),
    ],
)
def test_a_custom_loss_that_returns_something_else_is_refused(function: str, message: str) -> None:
    loss = load_custom_loss(f"custom_functions.{function}", {})
    with pytest.raises(ValueError, match=message):
        loss(inputs([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], lengths=[2]))
