"""Whose folder a checkpoint is: a run keeps its own and replaces what an earlier run left at the same step."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.training.checkpoint import Checkpointer
from meshrl.training.config import OptimConfig, SchedulerConfig
from meshrl.training.learner import Learner

NORM = "model.norm.weight"


def learner_filled_with(value: float) -> Learner:
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    learner = Learner(
        Qwen3ForCausalLM(config),
        loss=cross_entropy_loss,
        optim=OptimConfig(),
        scheduler=SchedulerConfig(),
        max_steps=None,
    )
    torch.nn.init.constant_(learner.model.get_parameter(NORM), value)
    return learner


def saved_value(folder: Path) -> float:
    return float(load_file(folder / "model.safetensors")[NORM][0])


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_new_run_replaces_what_an_earlier_one_left_at_the_same_step(tmp_path: Path, weights_only: bool) -> None:
    Checkpointer(learner_filled_with(1.0), tmp_path, tokenizer=None).save(weights_only=weights_only)
    later = Checkpointer(learner_filled_with(2.0), tmp_path, tokenizer=None)
    later.save(weights_only=weights_only)
    assert saved_value(tmp_path / "weights" / "step_0") == 2.0
    if not weights_only:
        resumed = learner_filled_with(3.0)
        Checkpointer(resumed, tmp_path, tokenizer=None).restore(0)
        assert float(resumed.model.get_parameter(NORM)[0].detach()) == 2.0


def test_the_same_step_of_a_run_is_written_once(tmp_path: Path) -> None:
    checkpointer = Checkpointer(learner_filled_with(1.0), tmp_path, tokenizer=None)
    folder = checkpointer.save(weights_only=True)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpointer.save(weights_only=True) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
