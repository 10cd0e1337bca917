"""What a run finds before it starts: services and engines that run already, and the code of its environments."""

from __future__ import annotations

import json
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

from meshrl.launch.preflight import engines, plugins, services
from meshrl.v1 import rollout_pb2, rollout_pb2_grpc
from meshrl.wire import convert
from meshrl.wire.types import EnvironmentInfo
from preflight_plan import found, plan


class HostOfWords(rollout_pb2_grpc.RolloutServiceServicer):
    def ListEnvironments(self, request: Any, context: Any) -> rollout_pb2.ListEnvironmentsResponse:  # noqa: N802
        words = EnvironmentInfo(name="words", taskset="my_words", num_tasks=12)
        return rollout_pb2.ListEnvironmentsResponse(environments=[convert.to_proto(words)])


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
        stopped.wait(60.0)


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


async def test_a_hub_that_was_started_by_hand_in_the_folder_is_an_error(tmp_path: Path) -> None:
    from meshrl.weights.decision_log import DecisionLog

    examined = plan("--output-dir", str(tmp_path))
    log = DecisionLog(tmp_path / "weight_hub" / "decisions.sqlite")
    await log.open()
    [finding] = found(services.check_hub, examined)
    await log.close()
    assert f"another hub is at work in {tmp_path / 'weight_hub'}; stop it" in finding
    assert found(services.check_hub, examined) == []


def test_options_of_an_environment_are_checked_and_its_data_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_functions.py").write_text("print('hello')\ndef advantage(rewards_G):\n    return rewards_G\n")
    file = tmp_path / "rl.toml"
    file.write_text("[[orchestrator.eval.env]]\nid = 'reverse_text'\nname = 'third'\nargs = { splt = 'held_out' }\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    custom = ("--orchestrator.advantage.type", "custom", "--orchestrator.advantage.import-path")
    environments = (
        *("--orchestrator.train.env.0.args.nonsense", "1", "--orchestrator.train.env.1.id", "no_such_taskset"),
        *("--orchestrator.train.env.1.name", "second"),
    )
    findings = found(plugins.check_plugins, plan("@", str(file), *custom, "my_functions.advantage", *environments))
    assert len(findings) == 4, findings
    assert "orchestrator.advantage.import_path 'my_functions.advantage': it cannot be called as" in findings[0]
    assert findings[1].startswith("error: environment 'reverse_text': its args do not fit 'reverse_text': ")
    option, flag = "orchestrator.train.env.0.args.nonsense", "--orchestrator.train.env.0.args.nonsense"
    assert "args.nonsense: there is no such option (options are task, " in findings[1]
    assert findings[1].endswith(f" ({option} from {flag})")
    assert findings[2].startswith("error: environment 'second': 'no_such_taskset' cannot be loaded: ")
    assert findings[2].endswith(" (orchestrator.train.env.1.id from --orchestrator.train.env.1.id)")
    assert findings[3] == (
        "error: environment 'third': its args do not fit 'reverse_text': args.splt: there is no such option, did you"
        f" mean split? (orchestrator.eval.env.0.args.splt from {file}:4)"
    )


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("loss", "return given.logprobs.sum()", "returned Tensor; return a meshrl.algorithms.losses.SequenceLoss"),
        ("loss", "return SequenceLoss(loss=given.advantages.sum())", "is 0; a loss is a function of sequence.logprobs"),
        ("loss", "return SequenceLoss(loss=given.logprobs.sum() * math.nan)", "nan]; compute a finite loss"),
        ("loss", "return SequenceLoss(loss=given.logprobs.sum(), metrics={'a': 'b'})", "reports 'b' as a; a metric is"),
        ("loss", "return 1 / 0", "trainer.loss: its function, or the import of it, failed with ZeroDivisionError"),
        ("loss", "return SequenceLoss(loss=(given.logprobs * given.advantages).sum())", None),
        ("advantage", "return None", "return a finite number for each of the 4 rollouts"),
        ("advantage", "return given[:-1]", "returned [0.0, 1.0, 0.0] for the rewards [0.0, 1.0, 0.0, 1.0]"),
        ("advantage", "return ['good', 'bad']", "returned ['good', 'bad']; return an array of numbers"),
        ("advantage", "raise KeyError('group')", "orchestrator.advantage: its function, or the import of it, failed"),
        ("advantage", "return given - given.mean()", None),
    ],
)
def test_a_function_of_the_users_own_is_tried(
    kind: str, body: str, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tried_objective.py").write_text(
        "import math\nfrom meshrl.algorithms.losses import SequenceLoss\n"
        f"def loss(given):\n    {body}\ndef advantage(given, lengths):\n    {body}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tried_objective", raising=False)
    asked = {"import_path": f"tried_objective.{kind}", "kwargs": {}}
    questions = {"loss": None, "advantage": None, "environments": None}
    questions[kind] = asked if kind == "loss" else {**asked, "group_size": 4}
    problems = [text for _, text, _ in plugins.answer(questions)]
    assert len(problems) == (words is not None)
    assert words is None or words in problems[0]


def test_a_dry_run_loads_the_tasks_of_every_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mesh_without_file.py").write_text(
        "import verifiers.v1 as vf\n__all__ = ['Words']\nclass Words(vf.Taskset[vf.Task, vf.TasksetConfig]):\n"
        "    def load(self):\n        open('/no/such/words')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    second = ("--orchestrator.train.env.1.id", "mesh_without_file", "--orchestrator.eval.env.0.id", "reverse_text")
    held_out = ("--orchestrator.eval.env.0.name", "held out", "--orchestrator.eval.env.0.args.split", "held_out")
    findings = found(plugins.check_plugins, plan(*second, *held_out, "--dry-run"))
    assert [findings[0], findings[3]] == [
        "note: environment 'reverse_text' can be loaded: 1672 tasks",
        "note: environment 'held out' can be loaded: 128 tasks",
    ]
    assert findings[1] == (
        "warning: environment 'mesh_without_file': nothing rewards a rollout of 'mesh_without_file', so every reward is"
        " 0; decorate a method of Task with @vf.reward, or set args.task.judges"
        " (orchestrator.train.env.1.id from --orchestrator.train.env.1.id)"
    )
    assert findings[2].startswith(
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

    monkeypatch.setattr("asyncio.create_subprocess_exec", unexpected)
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
