"""A resumed run of one process goes on to the bit as one that was never stopped; of AdamW see `test_resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_kit as kit
from meshrl.training.checkpoints.checkpointer import Checkpointer
from meshrl.training.config import CheckpointConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("settings", "optim"),
    [({}, {"type": "muon"}), ({}, {"type": "sgd", "momentum": 0.9}), ({"optim_cpu_offload": True}, {})],
    ids=["muon", "sgd", "state on the host"],
)
def test_ten_steps_resumed_for_ten_are_twenty_bit_for_bit(
    model: str, tmp_path: Path, settings: dict[str, Any], optim: dict[str, Any]
) -> None:
    straight = kit.build(model, settings, optim)
    whole = kit.train(straight, 20)
    assert whole[-1]["lr"] != whole[9]["lr"]

    first = kit.build(model, settings, optim)
    begun = kit.train(first, 10)
    for in_background in (False, True):
        checkpointer = Checkpointer(*first, tmp_path / str(in_background), tokenizer=None)
        checkpointer.progress.tokens = 77
        checkpointer.save_as(CheckpointConfig(save_async=in_background))
    kit.train(first, 12)  # what is saved must not change any more
    checkpointer.wait_for_save()

    for in_background in (False, True):
        torch.manual_seed(99)  # a new process has drawn other numbers until it restores
        later = kit.build(model, settings, optim)
        resumed = Checkpointer(*later, tmp_path / str(in_background), tokenizer=None)
        assert resumed.restore(-1) == 10
        assert resumed.progress.tokens == 77
        assert begun + kit.train(later, 20) == whole
        kit.assert_same(kit.state(later), kit.state(straight))
