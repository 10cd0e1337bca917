"""Runs that train a mixture of experts on the newest weights, each token through the experts that the engine chose.

One ends loudly, since a program of it is killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mesh_run import WITH_WORKERS, Run, check_kill, check_law
from meshrl_examples.model import create_model, create_tokenizer
from tiny_families import tiny_config

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

RECIPES = Path(__file__).parents[2] / "configs" / "reverse_text"


def toy_size(*, batch: int, group: int, steps: int) -> tuple[str, ...]:
    """Flags that make a recipe small enough for two CPU cores."""
    return (
        "--model.dtype", "float32", "--deployment.num-train-gpus", "1", "--inference.engine", "embedded",
        "--inference.max-model-len", "128", "--rollout.seq-len", "128", "--rollout.renderer.name", "default",
        "--trainer.seq-len", "1024", "--orchestrator.seq-len", "1024", "--orchestrator.batch-size", str(batch),
        "--orchestrator.group-size", str(group), "--orchestrator.sampling.max-tokens", "16", "--no-orchestrator.eval",
        "--max-steps", str(steps), "--max-async-level", "0",
    )  # fmt: skip


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    create_model(folder, seed=0, hidden_size=64, num_layers=2, num_experts=8)
    return folder


def of_steps(run: Run) -> list[dict[str, Any]]:
    return [record for record in run.records() if "reward/all/mean" in record]


def check_replayed(records: list[dict[str, Any]]) -> None:
    for record in records:
        assert record["max_vio/mean"] >= 0.0
        assert record["router_replay_tokens/mean"] > 0.9  # all but the last token of each sample
        assert record["router_replay_changed/mean"] < 1e-3
        assert record["mismatch_kl/all/mean"] < 1e-6


def test_a_mixture_learns_from_its_rewards_by_the_recipe_of_qwen3_30b_a3b_at_toy_size(
    start_run: Callable[..., Run],
) -> None:
    """All its weights in place of the recipe's adapters, from random ones: it finds letters that sentences have."""
    run = start_run(
        "@", str(RECIPES / "qwen3_30b_a3b.toml"), *toy_size(batch=64, group=8, steps=500), *WITH_WORKERS,
        "--no-trainer.model.lora", "--trainer.optim.lr", "3e-3",
    )  # fmt: skip
    run.wait_for(lambda: len(run.steps()) >= 18)
    check_kill(run, "orchestrator")
    assert run.steps()[:18] == [*range(1, 19)]
    records = of_steps(run)[:18]
    check_replayed(records)
    assert "train without router replay" not in run.log("trainer")
    rewards = [record["reward/all/mean"] for record in records]
    assert sum(rewards[-4:]) > 1.4 * sum(rewards[:4])


def test_the_recipe_of_gpt_oss_runs_at_toy_size(start_run: Callable[..., Run], tmp_path: Path) -> None:
    tokenizer = create_tokenizer()
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    config = tiny_config("gpt_oss", max_position_embeddings=512, **tokens)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt_oss")
    tokenizer.save_pretrained(tmp_path / "gpt_oss")
    small = (*toy_size(batch=16, group=4, steps=2), "--model.name", str(tmp_path / "gpt_oss"))
    run = start_run("@", str(RECIPES / "gpt_oss_20b.toml"), *small)
    assert run.finish() == 0, run.console.read_text()
    check_law(run, steps=2, most_off_policy=0)
    check_replayed(of_steps(run))
