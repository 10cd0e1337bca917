"""A key that several programs share is said once; what contradicts itself is refused."""

from pathlib import Path

import pytest

from run_config import COMPONENTS, load, parts_of, refusal


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--max-steps", "5"], {"trainer.max_steps": 5, "orchestrator.max_steps": 5}),
        (
            ["--seq-len", "64"],
            {
                "trainer.seq_len": 64,
                "orchestrator.seq_len": 64,
                "rollout.seq_len": 64,
                "inference.max_model_len": 64,
            },
        ),
        (["--trainer.seq-len", "4096"], {"orchestrator.seq_len": 4096, "rollout.seq_len": 2048}),
        (["--trainer.seq-len", "4096", "--orchestrator.seq-len", "256"], {"orchestrator.seq_len": 256}),
        (
            ["--model.name", "m"],
            {"trainer.model.name": "m", "inference.model.name": "m", "rollout.model.name": "m"},
        ),
        (["--output-dir", "o"], {f"{name}.output_dir": Path("o") for name in COMPONENTS}),
        (["--log.level", "debug"], {f"{name}.log.level": "debug" for name in COMPONENTS}),
        (["--seed", "3"], {"trainer.seed": 3, "orchestrator.seed": 3, "inference.seed": 3}),
        (["--run-id", "r"], {"trainer.run_id": "r", "orchestrator.run_id": "r"}),
        (["--max-async-level", "0"], {"orchestrator.max_async_level": 0}),
        (["--ckpt.interval", "5"], {"trainer.ckpt.interval": 5}),
        (["--deployment.num-train-gpus", "4"], {"trainer.deployment.num_train_gpus": 4}),
        (["--weights.transport", "stream"], {"trainer.weight_broadcast.type": "stream"}),
        (["--wandb.project", "p"], {"orchestrator.wandb.project": "p"}),
        (["--bench"], {"orchestrator.bench": True}),
        (
            ["--weight-broadcast.type", "stream"],
            {"trainer.weight_broadcast.type": "stream", "inference.weight_broadcast.type": "stream"},
        ),
        (["--orchestrator.log.vf-level", "debug"], {"rollout.vf_level": "debug"}),
        (["--orchestrator.client.api-key-var", "KEY"], {"rollout.client.api_key_var": "KEY"}),
        (["--trainer.model.name", "m"], {"inference.model.name": "m", "rollout.model.name": "m"}),
        (["--trainer.model.lora.rank", "16"], {"trainer.model.lora.target_parameters": []}),  # vLLM would refuse them
        (
            ["--trainer.model.lora.rank", "16", "--inference.engine", "embedded"],
            {"trainer.model.lora.target_parameters": ["all"]},
        ),
        (
            ["--trainer.model.lora", "--trainer.weight-broadcast.lora-adapter-only", "false"],
            {"trainer.model.lora.target_parameters": ["all"]},
        ),
        (
            ["--trainer.model.lora.rank", "4", "--inference.engine", "embedded"],
            {"trainer.model.lora.target_parameters": []},
        ),
    ],
)
def test_shared_key_reaches_the_programs_that_use_it(argv: list[str], expected: dict[str, object]) -> None:
    parts = parts_of(load("--inference", *argv))
    for path, value in expected.items():
        name, *keys = path.split(".")
        found = parts[name].config
        for key in keys:
            found = getattr(found, key)
        assert found == value, path


def test_own_key_of_a_component_wins_within_one_source(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text("max_steps = 10\n[trainer]\nmax_steps = 20\n")
    config = load("@", str(path))
    assert (config.trainer.max_steps, config.orchestrator.max_steps) == (20, 10)


def test_shared_key_on_the_command_line_beats_own_keys_in_component_files(tmp_path: Path) -> None:
    trainer, orchestrator = tmp_path / "t.toml", tmp_path / "o.toml"
    trainer.write_text("max_steps = 20\n[ckpt]\ninterval = 7\n")
    orchestrator.write_text("max_steps = 20\n")
    config = load(
        "--trainer", "@", str(trainer), "--orchestrator", "@", str(orchestrator), "--max-steps", "10", "--ckpt"
    )
    assert (config.trainer.max_steps, config.orchestrator.max_steps) == (10, 10)
    assert config.trainer.ckpt is not None
    assert config.trainer.ckpt.interval == 7


def test_shared_section_and_own_section_merge_key_by_key() -> None:
    config = load("--wandb.project", "p", "--orchestrator.wandb.log-extras.interval", "50")
    assert config.orchestrator.wandb is not None
    assert config.orchestrator.wandb.log_extras is not None
    assert (config.orchestrator.wandb.project, config.orchestrator.wandb.log_extras.interval) == ("p", 50)


def test_switching_a_shared_section_off_switches_it_off_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text("[wandb]\n[ckpt]\n[orchestrator.wandb]\nproject = 'p'\n")
    config = load("@", str(path), "--no-wandb", "--no-ckpt")
    assert (config.wandb, config.orchestrator.wandb, config.trainer.ckpt) == (None, None, None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--output-dir", "a", "--trainer.output-dir", "b"],
            "trainer.output_dir is 'b' but output_dir is 'a'; a run has one folder: set output_dir only",
        ),
        (
            ["--inference.model.name", "x", "--model.name", "y"],
            "inference.model.name is 'x' but trainer.model.name is 'y'; set model.name once",
        ),
        (["--orchestrator.run-id", "x"], "orchestrator.run_id is 'x' but the trainer's run is 'main'; set run_id once"),
        (
            ["--trainer.seq-len", "64"],
            "orchestrator.seq_len (2048) is more than trainer.seq_len (64); set seq_len once, or lower",
        ),
        (
            ["--inference.max-model-len", "64"],
            "rollout.seq_len (2048) is more than inference.max_model_len (64); raise max_model_len, or lower seq_len",
        ),
        (
            ["--trainer.max-steps", "5", "--orchestrator.max-steps", "6"],
            "orchestrator.max_steps (6) is more than trainer.max_steps (5); set max_steps once",
        ),
        (["--trainer.bench"], "trainer.bench measures the trainer without a run; start `trainer --bench`"),
        (["--num-engines", "2"], "num_engines is 2 but inference is off; add [inference] or leave it out"),
        (
            ["--weights.transport", "filesystem", "--weight-broadcast.type", "stream"],
            "weights.transport is 'filesystem' but trainer.weight_broadcast.type is 'stream'; set",
        ),
        (["--inference.server.host", "0.0.0.0"], "add inference.url with that address, as in https://ADDRESS:PORT"),
        (
            ["--num-engines", "2", "--inference.url", "https://a:1"],
            "inference.url is the address of one engine, and rl starts 2",
        ),
        (["--inference.headless"], "inference.headless is for other nodes; start `inference --headless` there"),
        (["--orchestrator.batch-size", "100"], "orchestrator.batch_size must be a multiple of group_size (8), got 100"),
        (["--trainer.optim.lrr", "1"], "unknown option --trainer.optim.lrr; did you mean --trainer.optim.lr?"),
        (
            ["--orchestrator.eval.env.0.id", "x", "--orchestrator.eval.env.0.name", "reverse-text"],
            "two environments are called 'reverse-text' but differ in id or args",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in refusal(capsys, *argv)


def test_run_without_environments_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rl: orchestrator.train.env: needs at least one environment, got none" in refusal(capsys, bare=True)


def test_booleans_switch_sections_of_programs_and_shared_ones(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text("inference = true\nwandb = true\nckpt = false\n[trainer.model]\ncompile = true\nac = false\n")
    config = load("@", str(path))
    assert config.trainer.model.compile is not None
    assert config.trainer.model.ac is None
    assert config.inference is not None
    assert config.orchestrator.wandb is not None
    assert config.trainer.ckpt is None
