"""The probe of a version is what its weights compute, adapters of the run included, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from many_runs import load
from meshrl.algorithms.losses import grpo_loss
from meshrl.algorithms.objective import Objective
from meshrl.models.adapters import mounted_set
from meshrl.trainer.publishing.probes import prober
from meshrl.training.config import OptimConfig
from tiny_qwen3 import save_tiny_qwen3
from trained import Trained

TOKENS = 17


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save_tiny_qwen3(tmp_path_factory.mktemp("model"), vocab_size=48, num_hidden_layers=2, **shape)


def test_probe_is_what_the_model_computes_and_leaves_gradients_and_random_numbers(model: str) -> None:
    learner, run = Trained.by(load(model), Objective(loss=grpo_loss), OptimConfig())
    adapters = mounted_set(learner.model)
    assert adapters is not None
    begin = prober(learner, run, TOKENS)
    assert begin is not None
    before = begin()()
    plain = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([before.token_ids])
    expected = plain(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert before.logprobs == pytest.approx(expected.tolist(), abs=1e-5)  # a new adapter adds nothing
    with torch.no_grad():
        adapters.flat.normal_(std=0.1)
    random_before = torch.get_rng_state()
    after = begin()()
    assert after.token_ids == before.token_ids
    assert after.logprobs != pytest.approx(before.logprobs, abs=1e-3)
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    assert learner.policy.training
    assert torch.equal(torch.get_rng_state(), random_before)


def test_no_tokens_are_no_probe(model: str) -> None:
    learner, run = Trained.by(load(model), Objective(loss=grpo_loss), OptimConfig())
    assert prober(learner, run, 0) is None
