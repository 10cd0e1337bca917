import numpy as np
import pytest

from meshrl.trainer.metrics import step_metrics
from meshrl.training.learner import StepResult, TokenRecord


def result() -> StepResult:
    tokens = TokenRecord(
        logprobs=np.array([-1.0, -1.0, -2.0, -0.5], np.float32),
        inference_logprobs=np.array([-1.0, -2.0, -1.0, -0.5], np.float32),
        entropies=np.array([0.1, 0.2, 0.3, 0.4], np.float32),
        advantages=np.array([1.0, 1.0, -1.0, -1.0], np.float32),
        masked=np.array([False, True, True, False]),
        env_index=np.array([0, 0, 1, 1], np.int32),
    )
    return StepResult(
        step=3,
        tokens=tokens,
        loss=2.5,
        metrics={"rl": 2.0, "ce": 0.5, "ratio": 1.25},
        grad_norm=0.5,
        zero_grad_ratio=0.0,
        lr=1e-3,
        forward_backward_s=1,
        optimizer_s=1,
    )


def test_mismatch_is_the_kl_estimator_per_environment_and_over_all() -> None:
    metrics = step_metrics(result(), ("a", "b", "unused"))
    risen, fallen = np.e - 2.0, np.exp(-1.0)  # r - log r - 1 at log r = 1 and -1
    assert metrics["mismatch_kl/a/mean"] == pytest.approx(risen / 2)
    assert metrics["mismatch_kl/b/max"] == pytest.approx(fallen)
    assert metrics["mismatch_kl/all/mean"] == pytest.approx((risen + fallen) / 4)
    assert metrics["mismatch_abs/all/mean"] == pytest.approx(0.5)
    assert not any("/unused/" in name for name in metrics)


def test_masked_tokens_are_split_by_the_sign_of_their_advantage() -> None:
    metrics = step_metrics(result(), ("a", "b"))
    assert metrics["masked_advantage_positive/mean"] == 0.25
    assert metrics["masked_advantage_negative/mean"] == 0.25


def test_entropy_loss_and_optimizer_metrics() -> None:
    metrics = step_metrics(result(), ("a", "b"))
    assert metrics["entropy/all/mean"] == pytest.approx(0.25)
    assert metrics["entropy/b/mean"] == pytest.approx(0.35)
    assert (metrics["loss/mean"], metrics["optim/grad_norm"], metrics["optim/lr"]) == (2.5, 0.5, 1e-3)


def test_what_the_objective_measured_is_logged_beside_the_loss() -> None:
    metrics = step_metrics(result(), ())
    assert (metrics["loss/rl"], metrics["loss/ce"], metrics["loss/ratio"]) == (2.0, 0.5, 1.25)
