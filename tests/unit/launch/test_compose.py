"""One configuration becomes a complete one for each program, with the addresses at which they find each other."""

from pathlib import Path

import pytest

from meshrl.core.config import dump_toml, load_config
from meshrl.launch.compose import Part, compose
from meshrl.launch.config import RLConfig
from run_config import load, parts_of


def test_addresses_lead_to_the_started_programs() -> None:
    parts = parts_of(load("--inference"))
    port = {name: parts[name].config.server.port for name in ("rollout", "trainer", "weights", "inference")}
    assert len(set(port.values())) == 4
    services = parts["orchestrator"].config.services
    assert services.rollout == [f"127.0.0.1:{port['rollout']}"]
    assert services.trainer == f"127.0.0.1:{port['trainer']}"
    assert services.weights == f"127.0.0.1:{port['weights']}"
    assert parts["trainer"].config.weight_broadcast.address == services.weights
    assert parts["inference"].config.weight_broadcast.address == services.weights
    assert (parts["rollout"].config.weights, parts["rollout"].config.client.base_url) == (services.weights, [])


def test_ports_that_are_given_stay() -> None:
    parts = parts_of(load("--inference", "--trainer.server.port", "5", "--inference.server.port", "6"))
    assert parts["trainer"].config.server.port == 5
    assert parts["inference"].config.server.port == 6


def test_servers_for_other_machines_are_reached_over_loopback() -> None:
    parts = parts_of(load("--trainer.server.host", "0.0.0.0", "--trainer.server.insecure"))
    port = parts["trainer"].config.server.port
    assert parts["orchestrator"].config.services.trainer == f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    "argv", [[], ["--no-inference"], ["--model.name", "m", "--seq-len", "64"], ["--inference", "--no-inference"]]
)
def test_without_an_inference_section_no_engine_is_started(argv: list[str]) -> None:
    url = "http://10.0.0.1:8000/v1"
    parts = parts_of(load(*argv, "--orchestrator.client.base-url", url))
    assert sorted(parts) == ["orchestrator", "rollout", "trainer", "weights"]
    assert parts["weights"].config.server.port == 50053  # where an engine that already runs looks for it
    assert (parts["rollout"].config.weights, parts["rollout"].config.client.base_url) == ("127.0.0.1:50053", [])
    assert parts["weights"].config.engines == ["http://10.0.0.1:8000"]  # and is called from


def test_the_usual_engine_is_called_where_none_is_started_or_named() -> None:
    assert parts_of(load())["weights"].config.engines == ["http://127.0.0.1:8000"]
    assert parts_of(load("--inference"))["weights"].config.engines == []


def test_running_engines_are_used_beside_those_that_are_started() -> None:
    parts = parts_of(
        load(
            "--inference", "--orchestrator.client.base-url", "http://10.0.0.1:8000/v1", "http://10.0.0.2:8000",
            "--orchestrator.client.api-key-var", "ENGINES",
        )
    )  # fmt: skip
    assert parts["weights"].config.engines == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert parts["weights"].config.engine_api_key_var == parts["rollout"].config.client.api_key_var == "ENGINES"
    assert parts["weights"].config.min_engines == 1
    assert "inference" in parts


def test_no_inference_beats_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text("[model]\nname = 'm'\n[inference]\n")
    assert load("@", str(path)).inference is not None
    assert load("@", str(path), "--no-inference", "--seq-len", "64").inference is None


def test_environments_of_training_and_evaluation_are_hosted_once_each() -> None:
    parts = parts_of(
        load(
            "--orchestrator.train.env.1.id", "b", "--orchestrator.train.env.1.ratio", "3",
            "--orchestrator.eval.env.0.id", "b", "--orchestrator.eval.env.1.id", "b",
            "--orchestrator.eval.env.1.name", "held-out", "--orchestrator.eval.env.1.args.split", "test",
        )
    )  # fmt: skip
    hosted = parts["rollout"].config.env
    assert [(env.resolved_name, env.id, env.args) for env in hosted] == [
        ("reverse-text", "reverse-text", {}),
        ("b", "b", {}),
        ("held-out", "b", {"split": "test"}),
    ]


def test_clients_end_before_the_programs_that_they_use() -> None:
    stage = {name: part.end_stage for name, part in parts_of(load("--inference")).items()}
    assert stage["orchestrator"] < stage["rollout"] == stage["trainer"] < stage["inference"] < stage["weights"]


def test_resolved_configuration_of_a_run_resolves_to_itself(tmp_path: Path) -> None:
    config = load(
        "--inference", "--max-steps", "5", "--wandb", "--orchestrator.log.vf-level", "debug", "--seq-len", "64"
    )
    path = tmp_path / "rl.toml"
    dump_toml(config, path)
    again = load_config(RLConfig, ["@", str(path)], prog="rl", environ={})
    assert again == config
    assert parts_of(again) == parts_of(config)


def test_every_part_loads_from_its_own_file(tmp_path: Path) -> None:
    part: Part
    for part in parts_of(load("--inference", "--num-engines", "2", "--wandb", "--ckpt")).values():
        path = tmp_path / f"{part.name}.toml"
        dump_toml(part.config, path)
        environ = {"PRIME_WANDB__PROJECT": "leaks", "PRIME_MAX_STEPS": "1", "PRIME_CKPT__INTERVAL": "1"}
        assert load_config(type(part.config), ["@", str(path)], prog=part.name, environ=environ) == part.config


def test_data_parallel_engines_of_several_runs_do_not_meet() -> None:
    engine = parts_of(load("--inference.data-parallel-size", "2"))["inference"].config
    assert engine.data_parallel_rpc_port > 40000
    given = parts_of(load("--inference.data-parallel-size", "2", "--inference.data-parallel-rpc-port", "13345"))
    assert given["inference"].config.data_parallel_rpc_port == 13345
    assert parts_of(load("--inference"))["inference"].config.data_parallel_rpc_port is None


def test_the_orchestrator_writes_its_part_of_the_checkpoints_that_the_trainer_saves() -> None:
    def of(*flags: str) -> tuple[int | None, bool]:
        config = parts_of(load("--inference", *flags))["orchestrator"].config
        return config.checkpoint_interval, config.checkpoint_at_end

    assert of() == (None, False)
    assert of("--ckpt") == (None, True)
    assert of("--ckpt.interval", "5") == (5, True)
    assert of("--ckpt.weights-only") == (None, False)


def test_each_launch_has_a_name_of_its_own() -> None:
    def named(*argv: str, session: str) -> str:
        parts = compose(load(*argv), lambda host: 40001, session=session)
        return next(part.config.session for part in parts if part.name == "orchestrator")

    assert named(session="a") == "a"
    assert named("--orchestrator.session", "mine", session="a") == "mine"


def test_engines_are_told_of_the_adapters_that_the_trainer_publishes() -> None:
    parts = parts_of(load("--inference", "--trainer.model.lora.rank", "12"))
    assert parts["inference"].config.lora_rank == 12
    arguments = parts["inference"].config.vllm_arguments()
    assert (arguments["enable_lora"], arguments["max_lora_rank"]) == (True, 16)
    merged = ("--trainer.model.lora.rank", "12", "--no-trainer.weight-broadcast.lora-adapter-only")
    assert parts_of(load("--inference", *merged))["inference"].config.lora_rank is None


def test_a_teacher_that_plays_gets_a_rollout_program_of_its_own() -> None:
    teacher = ["--orchestrator.teacher.client.base-url", "http://t:1", "--orchestrator.teacher.model.name", "big"]
    parts = parts_of(load("--inference", "--model.name", "m", "--orchestrator.training-mode", "sft", *teacher))
    played, policy = parts["teacher"].config, parts["rollout"].config
    assert (played.client.api, played.client.base_url, played.weights) == ("chat_completions", ["http://t:1"], None)
    assert (played.model.name, played.tokenizer, played.text_samples) == ("big", "m", True)
    assert [entry.resolved_name for entry in played.env] == [entry.resolved_name for entry in policy.env]
    assert parts["orchestrator"].config.teacher.rollout == [f"127.0.0.1:{played.server.port}"]
    assert played.output_dir == policy.output_dir / "teacher"
    running = ["--orchestrator.teacher.rollout", "10.0.0.1:5"]
    assert "teacher" not in parts_of(load("--inference", "--orchestrator.training-mode", "sft", *teacher, *running))
    assert "teacher" not in parts_of(load("--inference", "--orchestrator.training-mode", "opd", *teacher))


def test_engines_report_routes_where_the_trainer_replays_them() -> None:
    assert not parts_of(load("--inference"))["inference"].config.enable_return_routed_experts
    parts = parts_of(load("--inference", "--trainer.enable-router-replay"))
    assert parts["inference"].config.enable_return_routed_experts
    assert parts["inference"].config.vllm_arguments()["enable_return_routed_experts"] is True


@pytest.mark.parametrize(
    ("slow", "key"),
    [
        (("--orchestrator.exchange.port", "7"), "orchestrator.exchange"),
        (("--weight-broadcast.max-mbps", "50"), "trainer.weight_broadcast.max_mbps"),
    ],
)
def test_router_replay_over_slow_links_must_be_asked_for(
    slow: tuple[str, ...], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load("--inference", "--trainer.enable-router-replay", *slow)
    assert f"each token, and {key}" in capsys.readouterr().err
    load("--inference", "--trainer.enable-router-replay", "--trainer.router-replay-over-wan", *slow)
