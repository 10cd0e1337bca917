"""What the model section of a trainer refuses, and what a bare switch means."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from meshrl.core.config import dump_toml, load_config
from meshrl.trainer.config import TrainerConfig
from meshrl.training.config import CheckpointConfig
from meshrl.training.model_config import ActivationCheckpointConfig, CompileConfig, TrainerModelConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp_cpu_offload": True, "optim_cpu_offload": True}, "leave model.optim_cpu_offload out"),
        ({"ac_offloading": {}}, "set model.ac as well"),
        ({"lora": {"rank": 0}}, "greater than or equal to 1"),
        ({"ac": {"mode": "half"}}, "'full', 'attention' or 'selective'"),
    ],
)
def test_what_does_not_fit_together_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerModelConfig.model_validate(settings)


def test_bare_switches_turn_sections_on_with_their_defaults() -> None:
    flags = ["--model.ac", "--model.compile", "--model.lora.rank", "4", "--bench", "--ckpt", "--ckpt.resume-step", "-1"]
    config = load_config(TrainerConfig, flags, prog="trainer", environ={})
    assert config.model.ac == ActivationCheckpointConfig(mode="full", freq=1)
    assert config.model.compile == CompileConfig(backend="inductor")
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha) == (4, 32.0)
    assert config.bench is not None
    assert config.ckpt == CheckpointConfig(resume_step=-1)


def test_ac_and_compile_are_chosen_where_they_are_not_given_and_can_be_switched_off(tmp_path: Path) -> None:
    config = load_config(TrainerConfig, [], prog="trainer", environ={})
    assert (config.model.ac, config.model.compile) == ("auto", "auto")
    off = load_config(TrainerConfig, ["--no-model.ac", "--no-model.compile"], prog="trainer", environ={})
    assert (off.model.ac, off.model.compile) == (None, None)
    for written in (config, off):  # as rl hands it on
        dump_toml(written, tmp_path / "trainer.toml")
        assert load_config(TrainerConfig, ["@", str(tmp_path / "trainer.toml")], prog="trainer", environ={}) == written
    given = load_config(TrainerConfig, ["--model.ac.freq", "2", "--model.compile", "auto"], prog="trainer", environ={})
    assert given.model.ac == ActivationCheckpointConfig(mode="full", freq=2)
    assert given.model.compile == "auto"


@pytest.mark.parametrize("flags", ["--ckpt.resume-step 0", "--ckpt.resume-step -2", "--ckpt.keep-last 0"])
def test_checkpoints_that_mean_nothing_are_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(TrainerConfig, flags.split(), prog="trainer", environ={})
    assert flags.split()[0].replace("-", "_").removeprefix("__") in capsys.readouterr().err


def test_a_wrong_mode_is_one_problem(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, problem in (
        (["--model.ac.mode", "half"], """model.ac.mode: expected "full" | "attention" | "selective", got 'half'"""),
        (["--model.ac", "much"], """model.ac: expected section | "auto" or None, got 'much'"""),
    ):
        with pytest.raises(SystemExit):
            load_config(TrainerConfig, flags, prog="trainer", environ={})
        problems = [line for line in capsys.readouterr().err.splitlines() if "model.ac" in line]
        assert len(problems) == 1
        assert problem in problems[0]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, "alone; set trainer.weight_broadcast.lora_adapter_only to false"),
        ({"max_concurrent_runs": 2}, "several runs share; leave it out, or max_concurrent_runs"),
    ],
)
def test_modules_that_are_trained_whole_are_refused_where_no_engine_takes_them(
    changed: dict[str, object], why: str
) -> None:
    values = {"model": {"lora": {"modules_to_save": ["lm_head"]}}}
    TrainerConfig.model_validate(values | {"weight_broadcast": {"lora_adapter_only": False}})
    with pytest.raises(ValueError, match=why):
        TrainerConfig.model_validate(values | changed)
