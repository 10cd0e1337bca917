"""The flags of checkpoints, as users write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshrl.core.config import load_config
from meshrl.sft.config import SFTConfig
from meshrl.trainer.config import TrainerConfig
from meshrl.training.config import CheckpointConfig, SnapshotConfig


@pytest.mark.parametrize("program", [SFTConfig, TrainerConfig])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", None),
        ("--ckpt", {}),
        ("--ckpt.interval 25", {"interval": 25}),
        ("--ckpt --ckpt.interval 5 --ckpt.keep-last 3", {"interval": 5, "keep_last": 3}),
        ("--ckpt.interval 25 --ckpt.keep-interval 100", {"interval": 25, "keep_interval": 100}),
        ("--ckpt.save-async", {"save_async": True}),
        ("--ckpt.resume-step 10", {"resume_step": 10}),
        ("--ckpt.resume-step -1", {"resume_step": -1}),
        ("--ckpt.weights-only", {"weights_only": True}),
        ("--ckpt.weights.save-adapter-separately", {"weights": SnapshotConfig(save_adapter_separately=True)}),
    ],
)
def test_flags(program: type[Any], flags: str, expected: dict[str, Any] | None) -> None:
    loaded = load_config(program, flags.split(), prog="test")
    assert loaded.ckpt == (None if expected is None else CheckpointConfig(**expected))


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sft.toml"
    path.write_text("[ckpt]\ninterval = 2\nsave_async = true\n[ckpt.weights]\nsave_adapter_separately = true\n")
    assert load_config(SFTConfig, ["@", str(path)], prog="test").ckpt == CheckpointConfig(
        interval=2, save_async=True, weights=SnapshotConfig(save_adapter_separately=True)
    )


@pytest.mark.parametrize("flags", ["--ckpt.resume-step 0", "--ckpt.resume-step -2", "--ckpt.keep-last 0"])
def test_values_that_mean_nothing_are_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(SFTConfig, flags.split(), prog="test")
    assert flags.split()[0].replace("-", "_").removeprefix("__") in capsys.readouterr().err
