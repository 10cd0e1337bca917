"""The check of logprobs at the start of a run, on what a real engine has sampled and a real learner has trained."""

import numpy as np
import pytest
import torch
from loguru import logger
from transformers import PreTrainedModel

from family_checks import complete_all
from meshrl.algorithms.losses import aipo_loss
from meshrl.algorithms.objective import Objective
from meshrl.algorithms.packing import TrainSample, pack_samples
from meshrl.inference.embedded.engine import EmbeddedEngine
from meshrl.models.logprobs import PackedPolicy
from meshrl.orchestrator.config import LogprobCheckConfig
from meshrl.orchestrator.reports.logprob_check import LogprobCheck
from meshrl.sampling.retry import RunError
from meshrl.trainer.metrics import step_metrics
from meshrl.training.config import OptimConfig
from meshrl.training.learner import Learner
from meshrl.wire.types import StepEvent, StepState
from tiny_families import tiny_model
from trained import Trained

PROMPTS = [[2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13]]
FRESH, STALE = 0.0, 1.0


def metrics_of_first_step(served: PreTrainedModel, trained: PreTrainedModel) -> dict[str, float]:
    """The trainer's metrics of a step on what an engine of the served model has sampled."""
    completions = complete_all(EmbeddedEngine(served, max_model_len=64, num_slots=3, seed=0), PROMPTS)
    samples = [
        TrainSample(
            token_ids=np.array([*prompt, *completion.token_ids], np.int32),
            loss_mask=np.arange(len(prompt) + len(completion.token_ids)) >= len(prompt),
            logprobs=np.concatenate([np.zeros(len(prompt), np.float32), completion.logprobs]),
        )
        for prompt, completion in zip(PROMPTS, completions, strict=True)
    ]
    trainer = Trained.by(
        Learner(PackedPolicy(trained)),
        Objective(loss=lambda *args, **kwargs: aipo_loss(*args, delta=4.0, **kwargs)),
        OptimConfig(lr=1e-2),
    )
    return step_metrics(trainer.step(pack_samples(samples, seq_len=64).micro_batches), ())


def other_weights() -> PreTrainedModel:
    model = tiny_model("llama", None)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1.0)
    return model


def look(metrics: dict[str, float], age: float, *, fatal: bool = False, check: LogprobCheck | None = None) -> list[str]:
    """What the check logs of a step."""
    event = StepEvent(revision=3, step=1, state=StepState.DONE, durable_step=0, metrics=metrics)
    lines: list[str] = []
    sink = logger.add(lines.append, format="{level}|{message}")
    try:
        (check or LogprobCheck(LogprobCheckConfig(fatal=fatal))).check(event, {"off_policy/all/max": age})
    finally:
        logger.remove(sink)
    return lines


def test_engine_with_the_trainers_weights_passes_with_one_info_line() -> None:
    metrics = metrics_of_first_step(tiny_model("llama", None), tiny_model("llama", None))
    assert metrics["mismatch_abs/all/mean"] < 1e-4
    (line,) = look(metrics, FRESH, fatal=True)
    assert line.startswith("INFO|logprobs of step 1's tokens")
    assert line.rstrip().endswith("they agree")


def test_engine_with_other_weights_is_reported_or_fatal_but_not_for_staleness() -> None:
    metrics = metrics_of_first_step(other_weights(), tiny_model("llama", None))
    assert metrics["mismatch_abs/all/mean"] > 0.5
    check = LogprobCheck(LogprobCheckConfig())
    assert look(metrics, STALE, check=check) == []
    (line,) = look(metrics, FRESH, check=check)
    assert line.startswith("WARNING|")
    assert "(orchestrator.logprob_check.max_mean_abs) is no rounding" in line
    assert look(metrics, FRESH, check=check) == [], "it is said once"
    with pytest.raises(RunError, match=r"both are of version 0; .*logprob_check\.fatal = false trains nevertheless"):
        look(metrics, FRESH, fatal=True)
