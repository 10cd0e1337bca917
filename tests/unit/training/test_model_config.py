"""What the model section of a trainer refuses, and what a bare switch means."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from meshrl.core.config import dump_toml, load_config
from meshrl.sft.config import SFTConfig
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


WITHOUT_EFFECT = {
    "optim.momentum 0.9": "optim.momentum belongs to optim.type muon or sgd, not to adamw; leave it out (keys of",
    "optim.type sgd, optim.betas2 0.95": "optim.betas2 belongs to optim.type adamw or muon, not to sgd",
    "optim.type sgd, optim.eps 1e-6": "optim.eps belongs to optim.type adamw or muon",
    "scheduler.decay_steps 5": "scheduler.decay_steps belongs to scheduler.type linear or cosine or wsd, not to",
    "scheduler.min_lr 1e-7": "scheduler.min_lr belongs to scheduler.type linear",
    "ckpt.save_async true": "set ckpt.interval, or leave ckpt.save_async out",
    "ckpt.weights.save_adapter_separately true": "needs model.lora",
}
OF_TRAINER = {
    "join_rows always": "join_rows is about runs beside the trainer's own, and trainer.max_concurrent_runs is 1",
    "max_adapters_gib 2": "max_adapters_gib is about runs beside",
    "max_failed_steps 5": "max_failed_steps is about runs beside",
    "run_hooks.creation a.b": "run_hooks is about runs beside",
    "router_replay_over_wan true": "allows trainer.enable_router_replay over slow links; set that as well",
    "max_concurrent_runs 2, model.lora.rank 8, model.cp 2, join_rows always": "with model.cp or model.tp rows never",
    "weight_broadcast.type stream, weight_broadcast.bucket_mib 8": "weight_broadcast.bucket_mib belongs to",
    "weight_broadcast.type filesystem, weight_broadcast.host 10.0.0.1": "weight_broadcast.type auto or nccl, not to",
    "weight_broadcast.type nccl, weight_broadcast.broadcast_dir d": "weight_broadcast.type auto or filesystem, not to",
    "weight_broadcast.deltas off, weight_broadcast.anchor_every 8": "weight_broadcast.anchor_every is about deltas",
    "weight_broadcast.probe_tokens 0, weight_broadcast.max_probe_error 1": "max_probe_error is about probes",
}
OF_SFT = {
    "data.input_ids increasing": "data.input_ids belongs to data.type fake, not to sft; leave it out",
    "data.length variable": "data.length is for data.type fake and for --bench",
    "data.stopping_strategy first_exhausted": "data.stopping_strategy is for a mixture",
    "deployment.type multi_node, deployment.num_train_gpus 2": "deployment.gpus_per_node is what multi_node uses",
    "deployment.nodes_per_fsdp_group 1": "nodes_per_fsdp_group is for deployment.type 'multi_node'",
}


@pytest.mark.parametrize(
    ("program", "keys", "message"),
    [
        *((program, *case) for program in (TrainerConfig, SFTConfig) for case in WITHOUT_EFFECT.items()),
        *((TrainerConfig, *case) for case in OF_TRAINER.items()),
        *((SFTConfig, *case) for case in OF_SFT.items()),
    ],
)
def test_a_key_that_another_leaves_without_effect_is_refused(
    program: type[TrainerConfig | SFTConfig], keys: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for pair in keys.split(", ") for word in f"--{pair}".split()]
    with pytest.raises(SystemExit):
        load_config(program, flags, prog="it", environ={})
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 2, "one problem, and where --help is"


def test_keys_have_their_defaults_beside_any_other(tmp_path: Path) -> None:
    flags = "--optim.type sgd --optim.momentum 0.5 --optim.betas1 0.9 --scheduler.min-lr 0 --ckpt.interval 5"
    config = load_config(SFTConfig, flags.split(), prog="sft", environ={})
    dump_toml(config, tmp_path / "sft.toml")  # every key is in the file
    assert load_config(SFTConfig, ["@", str(tmp_path / "sft.toml")], prog="sft", environ={}) == config


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
