"""Checkpoints of a model that is sharded over one GPU: what is saved, at once or beside training, comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_kit as kit
from meshrl.training.checkpoints.checkpointer import Checkpointer
from meshrl.training.config import CheckpointConfig
from meshrl.training.parallel.rank_group import RankGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture
def parallel() -> Iterator[RankGroup]:
    group = RankGroup.start({}, device=torch.device("cuda"))
    yield group
    group.close()


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"lora": {"rank": 4, "dropout": 0.2}}, {"optim_cpu_offload": True}, {"fsdp_cpu_offload": True}],
    ids=["full", "lora with dropout", "optimizer on the host", "all on the host"],
)
def test_what_is_saved_comes_back(
    tmp_path: Path, parallel: RankGroup, settings: dict[str, Any], in_background: bool
) -> None:
    model, settings = kit.save_model(tmp_path / "model"), {"device": "cuda", **settings}
    trained = kit.build(model, settings, parallel=parallel)
    kit.train(trained, 3)
    saved = kit.state(trained)
    checkpointer = Checkpointer(*trained, tmp_path, tokenizer=None)
    checkpointer.save_as(CheckpointConfig(save_async=in_background))
    (expected,) = kit.train(trained, 4)  # what is saved must not change any more
    checkpointer.wait_for_save()

    resumed = kit.build(model, settings, parallel=parallel)
    kit.train(resumed, 1)  # draws numbers, and has a state to replace
    assert Checkpointer(*resumed, tmp_path, tokenizer=None).restore(-1) == 3
    kit.assert_same(kit.state(resumed), saved)
    (got,) = kit.train(resumed, 4)
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-4)
    assert got["lr"] == expected["lr"]
