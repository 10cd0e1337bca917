"""One configuration becomes five, and each value is said once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshrl.core.config import ConfigError, dump_toml, load_config
from meshrl.launch.compose import Part, compose
from meshrl.launch.config import RLConfig

TRAINS = ("--orchestrator.train.env.0.id", "reverse-text")
COMPONENTS = ("rollout", "trainer", "weights", "inference", "orchestrator")


def load(*argv: str, environ: dict[str, str] | None = None) -> RLConfig:
    return load_config(RLConfig, [*TRAINS, *argv], prog="rl", environ=environ or {})


def parts_of(config: RLConfig) -> dict[str, Any]:
    ports: Iterator[int] = iter(range(40001, 40100))

    def free_port(host: str) -> int:
        return next(ports)

    return {part.name: part for part in compose(config, free_port)}


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, bare: bool = False) -> str:
    with pytest.raises(SystemExit) as leaving:
        load_config(RLConfig, [*(() if bare else TRAINS), *argv], prog="rl", environ={})
    assert leaving.value.code == 2
    return capsys.readouterr().err


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


def test_wandb_of_the_trainer_is_taken_and_left_to_the_orchestrator() -> None:
    config = load("--wandb", "--no-trainer.wandb.log-extras.distributions")
    assert config.trainer.wandb is not None
    parts = parts_of(config)
    assert "wandb" not in parts["trainer"].config.model_dump()
    assert parts["orchestrator"].config.wandb.log_extras.distributions is True


def test_switching_a_shared_section_off_switches_it_off_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text("[wandb]\n[ckpt]\n[orchestrator.wandb]\nproject = 'p'\n")
    config = load("@", str(path), "--no-wandb", "--no-ckpt")
    assert (config.wandb, config.orchestrator.wandb, config.trainer.ckpt) == (None, None, None)


def test_addresses_lead_to_the_started_programs() -> None:
    parts = parts_of(load("--inference"))
    port = {name: parts[name].config.server.port for name in ("rollout", "trainer", "weights", "inference")}
    assert len(set(port.values())) == 4
    services = parts["orchestrator"].config.services
    assert services.rollout == f"127.0.0.1:{port['rollout']}"
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
    assert (parts["rollout"].config.weights, parts["rollout"].config.client.base_url) == (None, [url])
    assert parts["weights"].config.server.port == 50053  # where an engine that already runs looks for it


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


def test_several_engines_have_ports_gpus_and_seeds_of_their_own() -> None:
    parts = parts_of(
        load("--inference.tensor-parallel-size", "2", "--inference-gpu-ids", "0,1,2,3", "--trainer-gpu-ids", "4",
             "--seed", "7")
    )  # fmt: skip
    assert parts["inference"].environ == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert parts["inference_2"].environ == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert parts["trainer"].environ == {"CUDA_VISIBLE_DEVICES": "4"}
    assert parts["weights"].config.min_engines == 2
    assert parts["inference"].config.server.port != parts["inference_2"].config.server.port
    assert (parts["inference"].config.seed, parts["inference_2"].config.seed) == (7, 8)


def test_clients_end_before_the_programs_that_they_use() -> None:
    stage = {name: part.end_stage for name, part in parts_of(load("--inference")).items()}
    assert stage["orchestrator"] < stage["rollout"] == stage["trainer"] < stage["inference"] < stage["weights"]


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


def test_the_trainer_runs_a_process_on_each_of_its_gpus() -> None:
    trainer = parts_of(load("--trainer-gpu-ids", "6,7"))["trainer"]
    assert trainer.config.deployment.num_train_gpus == 2
    assert trainer.environ == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert parts_of(load("--trainer-gpu-ids", "6"))["trainer"].config.deployment.num_train_gpus == 1
    fewer = load("--trainer-gpu-ids", "6,7", "--deployment.num-train-gpus", "1")
    assert parts_of(fewer)["trainer"].config.deployment.num_train_gpus == 1


def test_more_training_processes_than_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--trainer-gpu-ids", "6", "--deployment.num-train-gpus", "2")
    assert "deployment.num_train_gpus is 2 but trainer_gpu_ids lists 1 GPU(s); list as many" in message


def test_data_parallel_engines_of_several_runs_do_not_meet() -> None:
    engine = parts_of(load("--inference.data-parallel-size", "2"))["inference"].config
    assert engine.data_parallel_rpc_port > 40000
    given = parts_of(load("--inference.data-parallel-size", "2", "--inference.data-parallel-rpc-port", "13345"))
    assert given["inference"].config.data_parallel_rpc_port == 13345
    assert parts_of(load("--inference"))["inference"].config.data_parallel_rpc_port is None


def test_restarts_are_everybodys_and_the_orchestrator_waits_for_them() -> None:
    parts = parts_of(load("--restarts", "3", "--ckpt.interval", "2", "--inference.max-model-len", "4096"))
    assert {name: part.restarts for name, part in parts.items()} == dict.fromkeys(COMPONENTS, 3)
    assert (
        parts["orchestrator"].config.deadlines.unreachable_s == 180.0 + 240.0
    )  # a restarted trainer may look that long for engines
    assert parts_of(load())["orchestrator"].config.deadlines.unreachable_s == 8.0
    own = load("--restarts", "3", "--ckpt.interval", "2", "--orchestrator.deadlines.unreachable-s", "9")
    assert parts_of(own)["orchestrator"].config.deadlines.unreachable_s == 9.0


def test_a_program_may_restart_more_or_less_often_than_the_others() -> None:
    argv = ["--inference.max-model-len", "4096", "--engine-restarts", "7", "--orchestrator-restarts", "5"]
    alone = parts_of(load(*argv))
    assert {name: part.restarts for name, part in alone.items()} == dict.fromkeys(COMPONENTS, 0) | {
        "inference": 7,
        "orchestrator": 5,
    }
    assert alone["orchestrator"].config.deadlines.unreachable_s == 8.0
    trainer = parts_of(load("--ckpt.interval", "2", "--trainer-restarts", "1"))
    assert (trainer["trainer"].restarts, trainer["rollout"].restarts) == (1, 0)
    assert trainer["orchestrator"].config.deadlines.unreachable_s == 420.0
    spared = parts_of(load("--restarts", "3", "--trainer-restarts", "0"))
    assert (spared["trainer"].restarts, spared["orchestrator"].restarts) == (0, 3)


@pytest.mark.parametrize("key", ["restarts", "trainer-restarts"])
@pytest.mark.parametrize("ckpt", [(), ("--ckpt",), ("--ckpt.interval", "2", "--ckpt.weights-only")])
def test_restarts_need_checkpoints_to_go_on_from(
    key: str, ckpt: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capsys, f"--{key}", "1", *ckpt)
    assert f"{key.replace('-', '_')} is 1" in message
    assert "ckpt" in message


def test_each_launch_has_a_name_of_its_own() -> None:
    def named(*argv: str, session: str) -> str:
        parts = compose(load(*argv), lambda host: 40001, session=session)
        return next(part.config.session for part in parts if part.name == "orchestrator")

    assert named(session="a") == "a"
    assert named("--orchestrator.session", "mine", session="a") == "mine"


def test_versions_travel_by_files_where_trainer_and_engine_share_a_gpu() -> None:
    shared = ("--inference-gpu-ids", "0", "--trainer-gpu-ids", "0")
    config = load("--inference", *shared)
    parts = {part.name: part for part in compose(config, lambda _: 40001, gpus=("0",))}
    assert parts["trainer"].config.weight_broadcast.type == "filesystem"
    assert parts["inference"].config.share_gpu
    apart = load("--inference", "--inference-gpu-ids", "0", "--trainer-gpu-ids", "1")
    parts = {part.name: part for part in compose(apart, lambda _: 40001, gpus=("0", "1"))}
    assert parts["trainer"].config.weight_broadcast.type == "auto"
    with pytest.raises(ConfigError, match="share a GPU"):
        compose(load("--inference", *shared, "--weights.transport", "nccl"), lambda _: 40001, gpus=("0",))


def test_engines_are_told_of_the_adapters_that_the_trainer_publishes() -> None:
    parts = parts_of(load("--inference", "--trainer.model.lora.rank", "12"))
    assert parts["inference"].config.lora_rank == 12
    arguments = parts["inference"].config.vllm_arguments()
    assert (arguments["enable_lora"], arguments["max_lora_rank"]) == (True, 16)
    merged = ("--trainer.model.lora.rank", "12", "--no-trainer.weight-broadcast.lora-adapter-only")
    assert parts_of(load("--inference", *merged))["inference"].config.lora_rank is None


SLEEPS = ("--inference", "--inference.sleep-while-training", "--max-async-level", "0")


@pytest.mark.parametrize(
    ("argv", "gpus"),
    [
        (("--inference-gpu-ids", "0", "--trainer-gpu-ids", "0"), ("0", "1")),
        ((), ("0",)),
        (("--inference.share-gpu",), ()),
    ],
    ids=["listed", "the only one", "said"],
)
def test_engines_that_sleep_are_asked_to_and_find_room_when_they_wake(
    argv: tuple[str, ...], gpus: tuple[str, ...]
) -> None:
    parts = {part.name: part.config for part in compose(load(*SLEEPS, *argv), lambda _: 40001, gpus=gpus)}
    assert parts["inference"].vllm_arguments()["enable_sleep_mode"] is True
    assert parts["orchestrator"].sleep_engines
    assert parts["trainer"].release_memory
    awake = {part.name: part.config for part in compose(load("--inference"), lambda _: 40001, gpus=("0",))}
    assert not awake["orchestrator"].sleep_engines
    assert not awake["trainer"].release_memory


def test_sleep_while_training_needs_a_shared_gpu() -> None:
    apart = ("--inference-gpu-ids", "0", "--trainer-gpu-ids", "1")
    for argv, gpus in ((apart, ("0", "1")), ((), ())):
        with pytest.raises(ConfigError, match="list the same GPU in inference_gpu_ids and trainer_gpu_ids"):
            compose(load(*SLEEPS, *argv), lambda _: 40001, gpus=gpus)


def test_sleep_while_training_needs_level_0_and_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, *SLEEPS[:2], "--max-async-level", "1")
    assert "inference.sleep_while_training needs max_async_level 0, got 1" in message
    assert "set max_async_level to 0" in message
    assert "the embedded engine has no" in refusal(capsys, *SLEEPS, "--inference.engine", "embedded")
    message = refusal(capsys, "--orchestrator.sleep-engines")
    assert "orchestrator.sleep_engines needs max_async_level 0, got 2" in message


def test_booleans_switch_sections_of_programs_and_shared_ones(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text("inference = true\nwandb = true\nckpt = false\n[trainer.model]\ncompile = true\nac = false\n")
    config = load("@", str(path))
    assert config.trainer.model.compile is not None
    assert config.trainer.model.ac is None
    assert config.inference is not None
    assert config.orchestrator.wandb is not None
    assert config.trainer.ckpt is None


RUNNING = {"rollout": "10.0.0.1:7001", "trainer": "10.0.0.2:7002", "weights": "10.0.0.3:7003"}


@pytest.mark.parametrize("names", [("rollout", "weights"), ("trainer", "weights"), ("weights",), tuple(RUNNING)])
def test_services_that_run_already_are_used_and_not_started(names: tuple[str, ...]) -> None:
    flags = [word for name in names for word in (f"--orchestrator.services.{name}", RUNNING[name])]
    parts = parts_of(load("--inference", *flags))
    assert set(parts) == set(COMPONENTS) - set(names)
    services = parts["orchestrator"].config.services
    for name in RUNNING:
        here = f"127.0.0.1:{parts[name].config.server.port}" if name in parts else ""
        assert getattr(services, name) == (RUNNING[name] if name in names else here), name
    assert parts["inference"].config.weight_broadcast.address == RUNNING["weights"]
    if "rollout" in parts:
        assert parts["rollout"].config.weights == RUNNING["weights"]
    if "trainer" in parts:
        assert parts["trainer"].config.weight_broadcast.address == RUNNING["weights"]


def test_resolved_configuration_of_a_run_starts_all_of_its_programs_again(tmp_path: Path) -> None:
    dump_toml(load("--inference"), tmp_path / "rl.toml")
    again = load_config(RLConfig, ["@", str(tmp_path / "rl.toml")], prog="rl", environ={})
    assert set(parts_of(again)) == set(COMPONENTS)


def test_keys_of_a_trainer_that_is_not_started_are_not_held_against_the_others() -> None:
    flags = ("--orchestrator.services.trainer", "h:1", "--orchestrator.services.weights", "h:2")
    own = ("--orchestrator.run-id", "theirs", "--orchestrator.seq-len", "9999", "--inference.model.name", "m")
    engine = ("--inference.max-model-len", "9999")
    parts = parts_of(load(*engine, *flags, *own, "--restarts", "1", "--ckpt.interval", "5"))
    assert parts["orchestrator"].config.run_id == "theirs"
    assert parts["orchestrator"].config.checkpoint_interval is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--orchestrator.services.trainer", "h:1"), "'h:1', a trainer that publishes to the hub that it was started"),
        (("--orchestrator.services.rollout", "h:1"), "'h:1', which cannot know the ports that rl chooses"),
        (("--orchestrator.services.rollout", ""), "orchestrator.services.rollout: expected text or None, got ''"),
    ],
)
def test_service_that_could_not_find_what_rl_starts_is_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    assert words in refusal(capsys, "--inference", *flags)


def test_service_that_knows_the_port_of_what_rl_starts_is_taken() -> None:
    trainer = parts_of(load("--inference", "--orchestrator.services.trainer", "h:1", "--weights.server.port", "7003"))
    assert trainer["orchestrator"].config.services.weights == "127.0.0.1:7003"
    rollout = ("--orchestrator.services.rollout", "h:1")
    assert "rollout" not in parts_of(load("--inference", *rollout, "--inference.server.port", "7000"))
    assert "rollout" not in parts_of(load(*rollout))


def test_the_orchestrator_waits_longer_than_a_trainer_may_look_for_its_hub() -> None:
    deadlines = parts_of(load("--trainer.hub-deadline-s", "600"))["orchestrator"].config.deadlines
    assert deadlines.startup_s == 660.0
    assert parts_of(load())["orchestrator"].config.deadlines.startup_s == 300.0
    own = load("--trainer.hub-deadline-s", "600", "--orchestrator.deadlines.startup-s", "50")
    assert parts_of(own)["orchestrator"].config.deadlines.startup_s == 50.0
    patient = load("--restarts", "1", "--ckpt.interval", "1", "--trainer.hub-deadline-s", "600")
    assert parts_of(patient)["orchestrator"].config.deadlines.unreachable_s == 780.0
