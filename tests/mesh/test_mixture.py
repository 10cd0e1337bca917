"""A run that trains a mixture of experts, each token through the experts that the engine chose for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mesh_run import WITH_WORKERS, Run
from meshrl_examples.model import create_model

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    create_model(folder, seed=0, hidden_size=64, num_layers=2, num_experts=8)
    return folder


def test_routes_reach_the_trainer_and_are_what_it_would_choose_itself(start_run: Callable[..., Run]) -> None:
    run = start_run("--max-steps", "4", "--max-async-level", "0", "--trainer.enable-router-replay", *WITH_WORKERS)
    assert run.finish() == 0, run.console.read_text()
    steps = [record for record in run.records() if "reward/all/mean" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    for record in steps:
        assert record["max_vio/mean"] >= 0.0
        assert record["router_replay_tokens/mean"] > 0.9  # all but the last token of each sample
        assert record["router_replay_changed/mean"] < 1e-3
        assert record["mismatch_kl/all/mean"] < 1e-6
    assert "train without router replay" not in run.log("trainer")
