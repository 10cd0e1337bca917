"""What is wrong with a run is said before anything is started, all of it at once."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from meshrl.core.config import load_config
from meshrl.launch.compose import compose
from meshrl.launch.config import RLConfig
from meshrl.launch.main import main
from meshrl.launch.preflight import engines, machine, models, plugins, services, storage
from meshrl.launch.preflight.findings import Check, Plan
from meshrl.v1 import rollout_pb2, rollout_pb2_grpc
from meshrl.wire import convert
from meshrl.wire.types import EnvironmentInfo

NUM_PARAMS = 1000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The files of a model with 1000 parameters of two bytes."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [10, 100], "data_offsets": [0, 2000]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(2000))
    return folder


@pytest.fixture(autouse=True)
def without_network_or_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def plan(*argv: str, model: Path | str = "m/m", gpus: tuple[str, ...] = ()) -> Plan:
    given = ["--orchestrator.train.env.0.id", "reverse_text", "--inference", "--model.name", str(model), *argv]
    config = load_config(RLConfig, given, prog="rl", environ={})
    chosen = iter(range(40001, 40100))
    parts = compose(config, lambda host: next(chosen), gpus=gpus)
    return Plan(config=config, parts=parts, gpus=gpus, chosen_ports=range(40001, 40100))


def found(check: Check, examined: Plan) -> list[str]:
    return [f"{finding.severity}: {finding.text}" for finding in check(examined)]


def rl(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["rl", "--orchestrator.train.env.0.id", "reverse_text", "--inference", *argv])
    with pytest.raises(SystemExit) as leaving:
        main()
    return leaving.value.code


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_everything_that_is_wrong_is_said_at_once_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "out"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = (
            ["--model.name", "/no/such/model", "--ckpt.resume-step", "4", "--deployment.num-infer-gpus", "1"],
            ["--orchestrator.services.rollout", "127.0.0.1:1", "--weights.server.port", str(port), "--wandb"],
        )
        code = rl(monkeypatch, "--output-dir", str(out), *wrong[0], *wrong[1], *flags)
    said = capsys.readouterr().err
    assert code == 2, said
    assert said.startswith("rl: nothing was started; 4 problem(s) must be solved first\n")
    for words in (
        "deployment.num_infer_gpus is 1 but no GPU is visible here",
        "trainer.model.name '/no/such/model' is no folder; give a folder",
        f"ckpt.resume_step is 4, but {out}/checkpoints holds steps none; set it to one of them",
        "orchestrator.services.rollout '127.0.0.1:1': nobody answered",
        "warning: wandb is on, but there is no key for api.wandb.ai",
    ):
        assert words in said
    assert not out.exists()


def test_a_run_that_can_start_is_said_to_be_valid_with_what_else_there_is_to_know(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert rl(monkeypatch, "--output-dir", str(out), "--model.name", str(model), "--wandb", "--dry-run") == 0
    assert capsys.readouterr().out == (
        "note: environment 'reverse_text' can be loaded: 1672 tasks\n"
        "warning: wandb is on, but there is no key for api.wandb.ai: its metrics will be missing; run 'wandb login',"
        " set WANDB_API_KEY, or set wandb.offline\n"
        f"dry run: the configuration is valid; resolved files are in {out / 'configs'}\n"
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("config.json", "has no config.json, so it is no Hugging Face model"),
        ("model.safetensors", "lacks its weights (model.safetensors); restore them"),
        ("tokenizer.json", "holds no tokenizer; save one there"),
    ],
)
def test_a_model_without_one_of_its_files_is_an_error(model: Path, spoil: str, words: str) -> None:
    assert found(models.check_models, plan(model=model)) == []
    (model / spoil).unlink()
    [finding] = found(models.check_models, plan(model=model))
    assert finding.startswith("error: ")
    assert words in finding


def test_every_shard_of_a_model_must_be_there(model: Path) -> None:
    (model / "model.safetensors").rename(model / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    [finding] = found(models.check_models, plan(model=model))
    assert "lacks its weights (two.safetensors)" in finding


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_configuration_that_is_none_is_an_error(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    [finding] = found(models.check_models, plan(model=model))
    assert finding.startswith(f"error: trainer.model.name {str(model)!r}: its config.json ")


def test_a_name_that_is_not_cached_is_a_note_or_offline_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = plan(model="nobody/no-such-model")
    [finding] = found(models.check_models, missing)
    assert finding.startswith("note: trainer.model.name 'nobody/no-such-model' is not in the cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    [finding] = found(models.check_models, missing)
    assert finding.startswith("error: trainer.model.name 'nobody/no-such-model' is neither a folder nor in the cache")


def test_a_cached_name_is_looked_at_where_transformers_looks(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    cached = tmp_path / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    shutil.copytree(model, cached / "snapshots" / "abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert found(models.check_models, plan(model="some/model")) == []
    (cached / "snapshots" / "abc" / "model.safetensors").unlink()
    [finding] = found(models.check_models, plan(model="some/model"))
    assert "lacks its weights" in finding


def test_programs_that_are_not_started_need_no_model() -> None:
    running = ("--orchestrator.services.trainer", "h:1", "--orchestrator.services.weights", "h:2")
    engine = ("--no-inference", "--orchestrator.services.rollout", "h:3")
    assert found(models.check_models, plan(*running, *engine, model="/no/such")) == []


@pytest.mark.parametrize(("step", "fits"), [("-1", True), ("4", True), ("5", False)])
def test_the_checkpoint_to_resume_from_must_be_there(tmp_path: Path, step: str, fits: bool) -> None:
    for folder in ("step_2/trainer", "step_4/trainer", "step_5", "step_5.superseded/trainer"):
        (tmp_path / "checkpoints" / folder).mkdir(parents=True)
    examined = plan("--output-dir", str(tmp_path), "--ckpt.resume-step", step)
    words = f"but {tmp_path}/checkpoints holds steps [2, 4]; set it to one of them"
    findings = found(storage.check_resume_step, examined)
    assert findings == [] if fits else words in findings[0]


def test_a_checkpoint_cannot_be_cleaned_away_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_4" / "trainer").mkdir(parents=True)
    flags = ("--output-dir", str(tmp_path), "--ckpt.resume-step", "4", "--clean-output-dir")
    [finding] = found(storage.check_resume_step, plan(*flags))
    assert "clean_output_dir deletes the checkpoints" in finding


@pytest.mark.parametrize(
    ("free", "flags", "expected"),
    [
        (15_999, ("--ckpt",), "error: "),
        (16_000, ("--ckpt",), ""),
        (16_000, (), ""),
        (79_999, ("--ckpt.interval", "2", "--max-steps", "10"), "warning: "),
        (80_000, ("--ckpt.interval", "2", "--max-steps", "10"), ""),
        (47_999, ("--ckpt.interval", "2", "--max-steps", "10", "--ckpt.keep-last", "2"), "warning: "),
        (48_000, ("--ckpt.interval", "2", "--max-steps", "10", "--ckpt.keep-last", "2"), ""),
        (4_000, ("--ckpt.interval", "2", "--max-steps", "2", "--ckpt.weights-only"), ""),
    ],
)
def test_checkpoints_must_fit_on_the_disk(
    model: Path, monkeypatch: pytest.MonkeyPatch, free: int, flags: tuple[str, ...], expected: str
) -> None:
    """1000 parameters: 4 bytes each in the weights of a CPU, 4 as float32 master, 8 in AdamW's state."""
    monkeypatch.setattr(storage, "free_bytes", lambda folder: free)
    findings = found(storage.check_disk, plan(*flags, model=model))
    assert [finding.startswith(expected) for finding in findings] == ([True] if expected else [])


def test_versions_need_room_in_memory_or_on_the_disk(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined = plan(model=model)
    assert found(storage.check_versions, examined) == []
    monkeypatch.setattr(storage, "SHM", tmp_path / "no-such")
    [finding] = found(storage.check_versions, examined)
    assert finding.startswith("note: ")
    monkeypatch.setattr(storage, "free_bytes", lambda folder: 11_999)
    [finding] = found(storage.check_versions, examined)
    assert finding.startswith("error: weight_broadcast.type is 'auto', but 3 versions of the weights take 0.00 GiB")
    assert found(storage.check_versions, plan("--weights.transport", "stream", model=model)) == []


def test_size_of_weights_is_read_from_their_headers(model: Path) -> None:
    assert models.stored_size(model) == models.ModelSize(num_params=NUM_PARAMS, num_bytes=2000)
    assert storage.version_bytes(plan(gpus=("0", "1")), models.ModelSize(num_params=10, num_bytes=20)) == 20
    (model / "model.safetensors").write_bytes(b"\xff" * 100)
    assert models.stored_size(model) is None


def test_ports_must_be_free_and_given_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        [busy] = found(machine.check_ports, plan("--trainer.server.port", port))
        assert busy == (
            f"error: trainer.server.port {port} cannot be used at 127.0.0.1 (another process listens there); stop what"
            " listens there, or leave it out"
        )
    assert found(machine.check_ports, plan("--trainer.server.port", port)) == []
    twice = found(machine.check_ports, plan("--trainer.server.port", port, "--rollout.server.port", port))
    assert twice == [
        f"error: rollout.server.port {port} is given to trainer as well; give each program a port of its own"
    ]


@pytest.mark.parametrize(("hard", "expected"), [(64, ["error"]), (1024, ["warning"]), (4096, []), (-1, [])])
def test_open_files_must_be_allowed(monkeypatch: pytest.MonkeyPatch, hard: int, expected: list[str]) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, hard))
    assert [finding.severity for finding in machine.check_open_files(plan())] == expected


def test_a_key_for_wandb_is_looked_for_where_wandb_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online, offline = plan("--wandb"), plan("--wandb.offline")
    assert [finding.severity for finding in machine.check_wandb(online)] == ["warning"]
    assert found(machine.check_wandb, offline) == found(machine.check_wandb, plan()) == []
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret")
    assert found(machine.check_wandb, online) == []
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    [finding] = found(machine.check_wandb, online)
    assert "no key for wandb.example.org" in finding
    assert "secret" not in finding
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert found(machine.check_wandb, online) == []
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert found(machine.check_wandb, online) == []


class HostOfWords(rollout_pb2_grpc.RolloutServiceServicer):
    def ListEnvironments(self, request: Any, context: Any) -> rollout_pb2.ListEnvironmentsResponse:  # noqa: N802
        words = EnvironmentInfo(name="words", taskset="my_words", num_tasks=12)
        return rollout_pb2.ListEnvironmentsResponse(environments=[convert.environment_to_proto(words)])


class Served:
    """A gRPC server with the standard health service, or without, and one environment called "words"."""

    def __init__(self, *, with_health: bool = True) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(HostOfWords(), self._server)
        self.health = health.HealthServicer()
        if with_health:
            health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        stopped: threading.Event = self._server.stop(None)
        stopped.wait(10)


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.close()


def test_a_service_that_runs_already_must_be_one(served: Served) -> None:
    examined = plan("--orchestrator.services.weights", served.address)
    [finding] = found(services.check_running_services, examined)
    assert finding.endswith("the server there has no meshrl.v1.WeightSync; correct the address")
    served.health.set("meshrl.v1.WeightSync", health_pb2.HealthCheckResponse.NOT_SERVING)
    [finding] = found(services.check_running_services, examined)
    assert finding == (
        f"note: orchestrator.services.weights {served.address!r} answers NOT_SERVING: the run begins once it serves"
    )
    served.health.set("meshrl.v1.WeightSync", health_pb2.HealthCheckResponse.SERVING)
    assert found(services.check_running_services, examined) == []
    mute = Served(with_health=False)
    [finding] = found(services.check_running_services, plan("--orchestrator.services.weights", mute.address))
    mute.close()
    assert "it needs the service grpc.health.v1.Health" in finding


def test_a_dry_run_asks_a_rollout_service_elsewhere_for_the_environments_that_are_loaded_there(served: Served) -> None:
    ports = ("--weights.server.port", "40000")
    elsewhere = ("--orchestrator.services.rollout", served.address, *ports)
    key = f"orchestrator.services.rollout {served.address!r}"
    words = ("--orchestrator.train.env.0.name", "words")
    assert found(services.check_environments_elsewhere, plan(*elsewhere, *words)) == []
    dry = plan(*elsewhere, *words, "--dry-run")
    assert found(plugins.check_plugins, dry) == []
    assert found(services.check_environments_elsewhere, dry) == [
        f"note: environment 'words' is loaded by {key}: 12 tasks"
    ]
    other = plan(*elsewhere, "--dry-run")
    assert found(services.check_environments_elsewhere, other) == [
        f"error: no rollout service hosts environment 'reverse_text': {key} has words; host it there, or correct its"
        " name"
    ]


def test_a_hub_that_was_started_by_hand_in_the_folder_is_an_error(tmp_path: Path) -> None:
    from meshrl.weights.storage.log import DecisionLog

    examined = plan("--output-dir", str(tmp_path))
    log = DecisionLog(tmp_path / "weight_hub" / "decisions.log")
    log.open()
    [finding] = found(services.check_hub, examined)
    log.close()
    assert f"another hub is at work in {tmp_path / 'weight_hub'}; stop it" in finding
    assert found(services.check_hub, examined) == []


def test_options_of_an_environment_are_checked_and_its_data_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_functions.py").write_text("print('hello')\ndef advantage(rewards_G):\n    return rewards_G\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    custom = ("--orchestrator.advantage.type", "custom", "--orchestrator.advantage.import-path")
    environments = (
        *("--orchestrator.train.env.0.args.nonsense", "1", "--orchestrator.train.env.1.id", "no_such_taskset"),
        *("--orchestrator.train.env.1.name", "second"),
    )
    findings = found(plugins.check_plugins, plan(*custom, "my_functions.advantage", *environments))
    assert len(findings) == 3, findings
    assert "orchestrator.advantage.import_path 'my_functions.advantage': it cannot be called as" in findings[0]
    assert findings[1].startswith("error: environment 'reverse_text': its args do not fit 'reverse_text': ")
    assert "nonsense" in findings[1]
    assert findings[2].startswith("error: environment 'second': 'no_such_taskset' cannot be loaded: ")


def test_a_dry_run_loads_the_tasks_of_every_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mesh_without_file.py").write_text(
        "import verifiers.v1 as vf\n__all__ = ['Words']\nclass Words(vf.Taskset[vf.Task, vf.TasksetConfig]):\n"
        "    def load(self):\n        open('/no/such/words')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    second = ("--orchestrator.train.env.1.id", "mesh_without_file", "--orchestrator.eval.env.0.id", "reverse_text")
    held_out = ("--orchestrator.eval.env.0.name", "held out", "--orchestrator.eval.env.0.args.split", "held_out")
    findings = found(plugins.check_plugins, plan(*second, *held_out, "--dry-run"))
    assert [findings[0], findings[2]] == [
        "note: environment 'reverse_text' can be loaded: 1672 tasks",
        "note: environment 'held out' can be loaded: 128 tasks",
    ]
    assert findings[1].startswith(
        "error: environment 'mesh_without_file': taskset 'mesh_without_file' cannot load its tasks: FileNotFoundError"
    )


def test_a_module_that_ends_its_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit('I only run on Mondays')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    custom = ("--orchestrator.advantage.type", "custom", "--orchestrator.advantage.import-path", "leaves.fn")
    findings = found(plugins.check_plugins, plan(*custom))
    assert findings == ["error: environments cannot be imported: I only run on Mondays"]


def test_our_own_taskset_without_options_needs_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.run", unexpected)
    assert found(plugins.check_plugins, plan()) == []


@pytest.fixture
def engine_answering() -> Iterator[Callable[[dict[str, object]], str]]:
    """Starts servers that answer GET /version with what they are given; returns the URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: dict[str, object]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_engines_that_run_already_must_take_versions(engine_answering: Callable[[dict[str, object]], str]) -> None:
    foreign, free = engine_answering({"version": "0.11.0"}), engine_answering({"version": 3, "hub": None})
    taken = engine_answering({"version": 3, "hub": "127.0.0.1:5", "hub_is_there": True})

    def named(*urls: str, more: tuple[str, ...] = ("--no-inference",)) -> list[str]:
        return found(engines.check_engines, plan(*more, "--orchestrator.client.base-url", *urls))

    assert named(f"{free}/v1") == []
    assert named(free, more=()) == []
    (text,) = named(foreign)
    assert text.startswith(f"error: engine {foreign} cannot take weight versions: it is no `inference` of meshrl")
    assert [line.split(":")[0] for line in (*named(foreign, free), *named(foreign, more=()))] == ["warning", "warning"]
    (text,) = named(taken)
    assert text.startswith(f"error: engine {taken} follows the weight hub at 127.0.0.1:5, whose run is going on")
    (text,) = named("http://127.0.0.1:1")
    assert text.startswith("warning: engine http://127.0.0.1:1 does not answer yet")
    (text,) = named(free, more=("--no-inference", "--orchestrator.services.weights", "127.0.0.1:5"))
    assert text.startswith("note: the hub at 127.0.0.1:5 runs already: it calls the engines of its own --engines")
