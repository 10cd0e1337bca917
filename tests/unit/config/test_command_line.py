"""What each way of writing a flag means."""

from typing import Any

import pytest

from config_kit import Sample
from meshrl.core.config import load_config


def value_at(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = config[int(part)] if part.isdecimal() else getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("argv", "path", "expected"),
    [
        (["--model.name", "X"], "model.name", "X"),
        (["--model.name=X"], "model.name", "X"),
        (["--model.trust-remote-code"], "model.trust_remote_code", True),
        (["--model.trust_remote_code"], "model.trust_remote_code", True),
        (["--max-steps", "10"], "max_steps", 10),
        (["--max-steps", "10", "--max-steps", "20"], "max_steps", 20),
        (["--max-steps", "None"], "max_steps", None),
        (["--max-norm", "None"], "max_norm", None),
        (["--no-max-norm"], "max_norm", None),
        (["--bench"], "bench", True),
        (["--bench", "false"], "bench", False),
        (["--bench=true"], "bench", True),
        (["--no-bench"], "bench", False),
        (["--no-eval-base"], "eval_base", False),
        (["--ckpt"], "ckpt.interval", None),
        (["--ckpt", "--ckpt.interval", "5"], "ckpt.interval", 5),
        (["--ckpt.interval", "5", "--ckpt"], "ckpt.interval", 5),
        (["--no-ckpt", "--ckpt"], "ckpt.interval", None),
        (["--env.0.id", "x", "--env", "[]"], "env", []),
        (["--ckpt.resume-step", "10"], "ckpt.resume_step", 10),
        (["--ckpt.resume-step", "-1"], "ckpt.resume_step", -1),
        (["--ckpt", "--no-ckpt"], "ckpt", None),
        (["--no-ckpt", "--ckpt.interval", "3"], "ckpt.interval", 3),
        (["--wandb"], "wandb.project", "meshrl"),
        (["--wandb", "--no-wandb.log-extras.distributions"], "wandb.log_extras.distributions", False),
        (["--wandb", "--no-wandb.log-extras"], "wandb.log_extras", None),
        (["--wandb", '{"project": "p"}'], "wandb.project", "p"),
        (["--gpu-ids", "0,1,2"], "gpu_ids", [0, 1, 2]),
        (["--gpu-ids", "[3, 4]"], "gpu_ids", [3, 4]),
        (["--gpu-ids", "7"], "gpu_ids", [7]),
        (["--gpu-ids", "None"], "gpu_ids", None),
        (["--tags", "a, b"], "tags", ["a", "b"]),
        (["--tags="], "tags", []),
        (["--env.0.id", "x", "--env.1.id", "y"], "env.1.id", "y"),
        (["--env.0.id", "x", "--env.0.args.num-examples", "5"], "env.0.args", {"num_examples": 5}),
        (["--env", '[{"id": "x"}]'], "env.0.id", "x"),
        (["--options.flag", "true"], "options", {"flag": True}),
        (["--options.text", "plain"], "options", {"text": "plain"}),
        (["--options.none", "None"], "options", {"none": None}),
        (["--options.a.b", "1.5"], "options", {"a": {"b": 1.5}}),
        (["--options", '{"k": [1]}'], "options", {"k": [1]}),
        (["--rollouts-per-example", "4"], "group_size", 4),
        (["--loss.type", "aipo", "--loss.delta", "2"], "loss.delta", 2.0),
        (["--loss.kl-tau", "0.25"], "loss.kl_tau", 0.25),
        (["--level", "5"], "level", 5),
        (["--level", "auto"], "level", "auto"),
        (["--server.host", "localhost"], "server.port", 50052),
        (["--model.name=@home"], "model.name", "@home"),
        (["--model.name", "None"], "model.name", "None"),
    ],
)
def test_flag_sets_the_key(load: Any, argv: list[str], path: str, expected: object) -> None:
    assert value_at(load(*argv), path) == expected


def test_bare_flag_keeps_what_a_file_says_about_the_section(load: Any, toml: Any) -> None:
    path = toml("[ckpt]\ninterval = 25\n")
    assert load("@", path, "--ckpt").ckpt.interval == 25


def test_no_flag_switches_off_what_a_file_switches_on(load: Any, toml: Any) -> None:
    assert load("@", toml("[wandb]\nproject = 'p'\n"), "--no-wandb").wandb is None


def test_place_in_a_list_changes_one_entry_of_a_file(load: Any, toml: Any) -> None:
    path = toml("[[env]]\nid = 'a'\nratio = 2.0\n[[env]]\nid = 'b'\n")
    config = load("@", path, "--env.0.args.k", "1", "--env.1.name", "c", "--env.2.id", "d")
    assert [(env.id, env.name, env.ratio, env.args) for env in config.env] == [
        ("a", None, 2.0, {"k": 1}),
        ("b", "c", 1.0, {}),
        ("d", None, 1.0, {}),
    ]


def test_arguments_default_to_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["prog", "--max-steps", "3"])
    assert load_config(Sample, prog="prog", environ={}).max_steps == 3
