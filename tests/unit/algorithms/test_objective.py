from dataclasses import replace

import pytest
import torch

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.algorithms.objective import BatchCounts, Normaliser, Objective, RowTokens, objective_loss

COUNTS = BatchCounts(rl_tokens=4, rl_sequences=2, ce_tokens=0, ref_kl_tokens=0)
NOTHING = BatchCounts(rl_tokens=0, rl_sequences=0, ce_tokens=0, ref_kl_tokens=0)


def row() -> RowTokens:
    """Two sequences, three and one sampled tokens; the third token was not sampled."""
    return RowTokens(
        logprobs=torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0], requires_grad=True),
        inference_logprobs=torch.tensor([-1.0, -2.0, 0.0, -4.0, -5.0]),
        advantages=torch.tensor([1.0, 1.0, 0.0, 1.0, -2.0]),
        rl_mask=torch.tensor([True, True, False, True, True]),
        sequence_ids=torch.tensor([0, 0, 0, 0, 1]),
        num_sequences=2,
    )


def gradient(objective: Objective, tokens: RowTokens, counts: BatchCounts) -> list[float]:
    loss = objective_loss(objective, tokens, counts)
    values: list[float] = torch.autograd.grad(loss.total, tokens.logprobs)[0].tolist()
    return values


@pytest.mark.parametrize(
    ("normaliser", "fixed_length", "expected"),
    [
        (Normaliser.TOKEN, None, [-1 / 4, -1 / 4, 0.0, -1 / 4, -1 / 4]),
        (Normaliser.SEQUENCE, None, [-1 / 6, -1 / 6, 0.0, -1 / 6, -1 / 2]),
        (Normaliser.FIXED, 8, [-1 / 16, -1 / 16, 0.0, -1 / 16, -1 / 16]),
    ],
)
def test_each_normaliser_weighs_tokens_as_its_paper_says(
    normaliser: Normaliser, fixed_length: int | None, expected: list[float]
) -> None:
    objective = Objective(loss=cross_entropy_loss, normaliser=normaliser, fixed_length=fixed_length)
    assert gradient(objective, row(), COUNTS) == pytest.approx(expected)


def test_weights_of_the_rl_term_multiply_what_its_tokens_add() -> None:
    tokens = replace(row(), rl_weights=torch.tensor([1.0, 0.5, 7.0, 0.0, 1.0]))
    loss = objective_loss(Objective(loss=cross_entropy_loss), tokens, COUNTS)
    assert loss.total.item() == pytest.approx(7.0 / 4)
    assert loss.metrics["rl"].item() == pytest.approx(7.0 / 4)
    assert set(loss.metrics) == {"rl"}


def test_ref_kl_pulls_to_the_reference_with_a_bounded_ratio_where_a_token_was_sampled() -> None:
    tokens = replace(
        row(),
        inference_logprobs=torch.tensor([-1.0, -9.0, 0.0, -4.0, -5.0]),
        ref_kl_weights=torch.tensor([1.0, 1.0, 0.5, 0.0, 0.0]),
        ref_logprobs=torch.tensor([-2.0, -2.5, -1.0, float("nan"), float("nan")]),
    )
    objective = Objective(loss=cross_entropy_loss, ref_kl_tau=2.0, ref_kl_delta=3.0)
    counts = replace(NOTHING, ref_kl_tokens=10)
    # tau * weight * min(r, delta) * (log p - log ref) / 10, with r = 1 for the third, which nothing sampled
    assert gradient(objective, tokens, counts) == pytest.approx([0.2, 2.0 * 3.0 * 0.5 / 10, -0.2, 0.0, 0.0])
    value = 2.0 * (0.5 + 3.0 * 0.125 + 0.5 * 2.0) / 10
    assert objective_loss(objective, tokens, counts).metrics["ref_kl"].item() == pytest.approx(value)


def test_ref_kl_gradient_on_policy_is_that_of_the_reverse_kl() -> None:
    logits = torch.tensor([0.3, -1.0, 0.7], requires_grad=True)
    reference = torch.tensor([0.1, 0.2, 0.7]).log()
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    logprobs = logits.log_softmax(0)
    # The expectation over what the policy samples: each token of the vocabulary with its probability as weight.
    tokens = RowTokens(
        logprobs=logprobs,
        inference_logprobs=logprobs.detach(),
        advantages=torch.zeros(3),
        rl_mask=torch.ones(3, dtype=torch.bool),
        sequence_ids=torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        ref_kl_weights=logprobs.detach().exp(),
        ref_logprobs=reference,
    )
    loss = objective_loss(Objective(loss=cross_entropy_loss), tokens, replace(NOTHING, ref_kl_tokens=1))
    assert torch.autograd.grad(loss.total, logits)[0].tolist() == pytest.approx(exact.tolist(), rel=1e-5, abs=1e-7)


def test_a_term_without_tokens_adds_nothing_but_the_total_can_go_backward() -> None:
    tokens = replace(row(), ce_weights=torch.zeros(5), ref_kl_weights=torch.zeros(5), ref_logprobs=torch.zeros(5))
    loss = objective_loss(Objective(loss=cross_entropy_loss), tokens, NOTHING)
    assert loss.total.item() == 0.0
    assert loss.metrics == {}
    assert torch.autograd.grad(loss.total, tokens.logprobs)[0].tolist() == [0.0] * 5


def test_unweighted_tokens_of_a_term_may_hold_anything() -> None:
    tokens = replace(
        row(),
        logprobs=torch.tensor([-1.0, -2.0, -torch.inf, -4.0, -5.0], requires_grad=True),
        ce_weights=torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0]),
    )
    objective = Objective(loss=cross_entropy_loss)
    assert gradient(objective, tokens, replace(NOTHING, ce_tokens=2)) == [0.0, -0.25, 0.0, 0.0, 0.0]
    assert objective_loss(objective, tokens, replace(NOTHING, ce_tokens=2)).total.item() == 0.5


def test_ref_kl_weights_without_reference_logprobs_are_refused() -> None:
    tokens = replace(row(), ref_kl_weights=torch.ones(5))
    with pytest.raises(ValueError, match="ref_logprobs"):
        objective_loss(Objective(loss=cross_entropy_loss), tokens, replace(NOTHING, ref_kl_tokens=5))
