"""The same training on one rank and on two, sharded, replicated, checkpointed, compiled: the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

import checkpoint_kit
import forked_ranks
import loss_curves
from meshrl_examples.model import create_model

pytestmark = pytest.mark.timeout(700)  # processes of their own that import torch, on a machine that may be busy
STEPS = 2
ON_TWO_RANKS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp": {"dp_replicate": 2},
    "fsdp gathered once a step": {"reshard_after_forward": False},
    "fsdp gathered once a step, reduced in half precision": {
        "reshard_after_forward": False,
        "reduce_dtype": "bfloat16",
    },
    "evaluated before its step": {"evaluate": True},
    "gathered and evaluated": {"evaluate": True, "reshard_after_forward": False},
    "fsdp with checkpointing": {"ac": {}},
    "fsdp on the host": {"fsdp_cpu_offload": True},
    "fsdp with optimizer state on the host": {"optim_cpu_offload": True},
    "muon": {"optim": {"type": "muon"}},
    "lora": {"lora": {"rank": 4}},
    "lora of half precision": {"lora": {"rank": 4}, "dtype": "bfloat16"},
    "shared prompts": {"prompt": 12, "share": True},
    "shared rows": {"cp": 2, "compile": {"backend": "aot_eager"}, "ac": {"mode": "selective"}},
    "shared products": {"tp": 2, "compile": {"backend": "aot_eager"}, "ac": {"mode": "selective"}},
    "shared products, gathered once a step": {"tp": 2, "reshard_after_forward": False, "optim_cpu_offload": True},
    "shared products on the host": {"tp": 2, "fsdp_cpu_offload": True},
}
ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"ac": {}},
    "every second block": {"ac": {"freq": 2}},
    "all but attention": {"ac": {"mode": "attention"}},
    "selective checkpointing": {"ac": {"mode": "selective"}},
    "compiled": {"compile": {"backend": "eager"}},
    "head in pieces": {"max_logits_bytes": 4096},
    "optimizer state on the host": {"optim_cpu_offload": True},
}
OF_THEIR_OWN = {name: ON_TWO_RANKS[name] for name in ("muon", "lora", "lora of half precision")} | {
    "shared prompts": {"prompt": 12, "share": False},
}
TOLERANCES = {
    "muon": 1e-4,
    "lora of half precision": 1e-2,
    "fsdp gathered once a step, reduced in half precision": 1e-2,
}  # muon makes matrices orthogonal in bfloat16


Curves = dict[str, Any]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> list[Curves]:
    """Of one rank and of two, in processes of their own: compilers warn, and ranks need them anyway."""
    folder = tmp_path_factory.mktemp("curves")
    checkpoint_kit.save_model(folder / "model", num_hidden_layers=3)
    create_model(folder / "mixture", seed=0, hidden_size=64, num_layers=2, num_experts=8)
    lora = {"rank": 8, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    experts = {"experts": {"name": str(folder / "mixture"), "lora": lora}}
    arguments: list[str] = []
    for ranks, wanted in enumerate((ALONE | OF_THEIR_OWN | experts, ON_TWO_RANKS | experts), 1):
        arguments += ["--"] * bool(arguments)
        arguments += [str(folder / "model"), str(folder / str(ranks)), str(STEPS), json.dumps(wanted)]
    done = subprocess.run(
        [sys.executable, forked_ranks.__file__, "1,2", loss_curves.__file__, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / str(ranks)).read_text()) for ranks in (1, 2)]


@pytest.fixture(scope="module")
def alone(curves: list[Curves]) -> Curves:
    return curves[0]


@pytest.fixture(scope="module")
def two_ranks(curves: list[Curves]) -> Curves:
    return curves[1]


@pytest.mark.parametrize("name", ALONE)
def test_what_saves_memory_or_time_changes_no_number(name: str, alone: dict[str, Any]) -> None:
    plain, other = alone["plain"], alone[name]
    assert other["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    assert other["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    assert other["weights"] == pytest.approx(plain["weights"], rel=1e-5)


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_train_as_one(name: str, alone: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    plain, other = alone[name if name in OF_THEIR_OWN else "plain"], two_ranks[name]
    assert other["tokens"] == plain["tokens"]  # no loss token is lost, nor counted twice
    tolerance = TOLERANCES.get(name, 1e-5)
    assert other["loss"] == pytest.approx(plain["loss"], abs=tolerance)
    assert other["grad_norm"] == pytest.approx(plain["grad_norm"], rel=10 * tolerance)
    assert other["zero_grad_ratio"] == pytest.approx(plain["zero_grad_ratio"], abs=max(1e-4, tolerance))
    assert other["weights"] == pytest.approx(plain["weights"], rel=tolerance)


def test_the_curve_is_one_of_training(alone: dict[str, Any]) -> None:
    assert len(alone["plain"]["weights"]) > 10
    assert len(set(alone["plain"]["loss"])) == STEPS


def test_adapters_of_experts_train_on_two_ranks_as_on_one(alone: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    one, two = alone["experts"], two_ranks["experts"]
    assert two["tokens"] == one["tokens"]
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-5)
