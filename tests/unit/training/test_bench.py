"""`--bench`: a model cut to a few layers, routers that are balanced, and what the table names of both."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.algorithms.objective import Objective
from meshrl.training.bench.config import BenchConfig
from meshrl.training.bench.run import BenchReport, bench_rank
from meshrl.training.config import TrainingConfig
from meshrl.training.model_config import TrainerModelConfig
from tiny_qwen3 import SHAPE

LAYERS = 3


def report(folder: Path, bench: BenchConfig, *, dense: bool = False) -> BenchReport:
    """Of a folder that has a shape alone, without weights."""
    kinds = ["full_attention"] * LAYERS
    shape = {**SHAPE, "num_hidden_layers": LAYERS, "layer_types": kinds}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    (Qwen3Config(**shape) if dense else Qwen3MoeConfig(**shape, **experts)).save_pretrained(folder / "shape")
    model = TrainerModelConfig(name=str(folder / "shape"), device="cpu")
    config = TrainingConfig(model=model, output_dir=folder)
    return bench_rank(config, bench, objective=Objective(loss=cross_entropy_loss), seq_len=64, environment={})


def test_a_part_of_the_layers_is_measured_with_random_weights(tmp_path: Path) -> None:
    whole = report(tmp_path, BenchConfig(steps=1, warmup_steps=0, random_weights=True))
    part = report(tmp_path, BenchConfig(steps=1, warmup_steps=0, num_layers=1))
    outside = SHAPE["vocab_size"] * SHAPE["hidden_size"] + SHAPE["hidden_size"]  # tied embeddings, last norm
    assert (whole.parameters - outside) == LAYERS * (part.parameters - outside) > 0
    assert part.model.endswith("(1 layers)")
    with pytest.raises(ValueError, match=r"bench\.num_layers is 4, but .* has 3"):
        report(tmp_path, BenchConfig(num_layers=4))


def test_balanced_routers_send_each_expert_as_many_tokens_and_are_named(tmp_path: Path) -> None:
    own, balanced = (
        report(tmp_path, BenchConfig(steps=1, warmup_steps=0, num_layers=2, balanced_routing=wanted))
        for wanted in (False, True)
    )
    assert own.max_vio is not None
    assert own.max_vio > 0 == balanced.max_vio
    assert "as the routers choose" in own.table()
    assert "routers balanced by bench.balanced_routing" in balanced.table()
    with pytest.raises(ValueError, match=r"bench\.balanced_routing is set, but this model has no experts"):
        report(tmp_path, BenchConfig(num_layers=1, balanced_routing=True), dense=True)
    with pytest.raises(ValueError, match=r"bench\.median_length is set, but lengths are fixed"):
        report(tmp_path, BenchConfig(num_layers=1, median_length=16), dense=True)
