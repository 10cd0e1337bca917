"""A live run trains on under calls that no sane client makes, any gRPC tool calls it, and no second `rl` disturbs it.

The tests share one run with those of `test_live_displays`, in the order of this file; the last one ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import go_client
from attempts import Attempts
from live_fuzz import GRPC_CALLS, HTTP_REQUESTS, fuzz_grpc, fuzz_http, tracebacks
from mesh_run import PROGRAMS, Run, environ
from meshrl.cli.status import status_schema
from meshrl.client import ChannelOptions, RolloutClient, TrainerClient, WeightSyncClient
from meshrl.client.credentials import INSECURE, TokenCredentials
from meshrl.core.private_folders import versions_folder
from meshrl.wire.errors import MeshError, Reason
from other_user import as_other_user, called, ends, files_of, posted

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(420)]

BUF = Path(__file__).parents[2] / ".tools/buf/node_modules/.bin/buf"
STEPS_AFTER = 3
ENVIRONMENTS = {"reverse_text", "held_out"}


def test_a_run_trains_on_under_calls_that_make_no_sense(live_run: Run) -> None:
    run = live_run
    rpcs = asyncio.run(fuzz_grpc(run, seed=1))
    assert rpcs.codes.total() == GRPC_CALLS
    assert not rpcs.wrong, "\n".join(rpcs.wrong[:20])
    requests = asyncio.run(fuzz_http(run, seed=2))
    assert requests.statuses.total() == HTTP_REQUESTS
    assert not requests.wrong, "\n".join(requests.wrong[:20])
    trained = len(run.steps())
    run.wait_for(lambda: len(run.steps()) >= trained + STEPS_AFTER)
    assert not (found := tracebacks(run)), "\n".join(found[:5])
    assert "Traceback" not in run.console.read_text()


def buf_curl(*arguments: str) -> str:
    command = [BUF, "curl", "--http2-prior-knowledge", "--protocol", "grpc", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 0, done.stderr
    return done.stdout


def buf_call(run: Run, address: str, method: str, body: dict[str, Any]) -> dict[str, Any]:
    """One call by `buf curl`, with nothing but the server's reflection and an operator's token to go by."""
    token = f"authorization: Bearer {run.secret('operator.token')}"
    said = buf_curl("--header", token, "-d", json.dumps(body), f"http://{address}/{method}")
    answer: dict[str, Any] = json.loads(said)
    return answer


def test_any_grpc_tool_lists_and_calls_the_services_of_a_live_run(live_run: Run) -> None:
    run = live_run
    addresses = {program: f"127.0.0.1:{run.port(program)}" for program in ("rollout", "trainer", "weights")}
    services = {"rollout": "RolloutService", "trainer": "TrainerService", "weights": "WeightSync"}
    for program, service in services.items():
        listed = buf_curl("--list-services", f"http://{addresses[program]}").split()
        assert {f"meshrl.v1.{service}", "grpc.health.v1.Health"} <= set(listed)
        health = buf_call(run, addresses[program], "grpc.health.v1.Health/Check", {"service": f"meshrl.v1.{service}"})
        assert health["status"] == "SERVING"

    environments = buf_call(
        run, addresses["rollout"], "meshrl.v1.RolloutService/ListEnvironments", {"contractVersion": "1.0"}
    )
    assert {environment["name"] for environment in environments["environments"]} == ENVIRONMENTS
    trainer = buf_call(run, addresses["trainer"], "meshrl.v1.TrainerService/GetTrainer", {"contractVersion": "1.0"})
    assert trainer["runs"][0]["runId"] == "main"
    assert int(trainer["runs"][0]["step"]) >= 1
    engines = buf_call(run, addresses["weights"], "meshrl.v1.WeightSync/ListEngines", {})
    assert engines["engines"][0]["routable"] is True
    assert engines["engines"][0]["state"].startswith("AGENT_STATE_")


@pytest.mark.skipif(go_client.why_not() is not None, reason=str(go_client.why_not()))
def test_a_client_in_go_lists_watches_and_plays(live_run: Run) -> None:
    run = live_run
    program = go_client.built()

    def go(*arguments: str) -> list[str]:
        env = {**os.environ, "MESHRL_TLS_TOKEN": str(run.output_dir / "credentials" / "operator.token")}
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=180.0, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    address = {name: f"127.0.0.1:{run.port(name)}" for name in ("rollout", "trainer", "weights")}
    assert {line.split()[0] for line in go("list", address["rollout"])} == ENVIRONMENTS
    assert all("AGENT_STATE_" in line for line in go("engines", address["weights"]))
    watched = [line.split()[:2] for line in go("watch", "-count", "2", address["trainer"])]
    assert watched == [["step", "1"], ["step", "2"]]
    *played, summary = go("rollouts", "-environment", "reverse_text", "-group-size", "3", address["rollout"])
    assert summary == "3 finished, 0 failed"
    assert all(re.match(r"reward -?\d\.\d{3}  [1-9]\d* tokens", line) for line in played)
    refused = subprocess.run(
        [program, "rollouts", "-environment", "none", address["rollout"]],
        capture_output=True, text=True, timeout=60.0, env={**os.environ, "MESHRL_TLS_TOKEN": ""},
    )  # fmt: skip
    assert refused.returncode == 1
    assert "UNAUTHENTICATED" in refused.stderr


def engine_status(run: Run, path: str, body: dict[str, Any]) -> int:
    """The HTTP status of a POST to the run's engine by somebody without its key."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{run.port('inference')}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


async def refusals(run: Run) -> dict[str, Reason]:
    """What somebody is told who can reach the ports of a run but not read its files."""
    options = ChannelOptions(credentials=INSECURE)
    found = {}
    async with AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(TrainerClient(f"127.0.0.1:{run.port('trainer')}", options))
        hub = await stack.enter_async_context(WeightSyncClient(f"127.0.0.1:{run.port('weights')}", options))
        rollout = await stack.enter_async_context(RolloutClient(f"127.0.0.1:{run.port('rollout')}", options))
        for name, attempt in {
            "Drain": trainer.drain(10.0),
            "ActivateVersion": hub.activate_version(run_id="main", version=1, prepare_deadline_s=1.0),
            "CancelRollouts": rollout.cancel_rollouts(()),
            "GetTrainer": trainer.get_trainer(),
            "ListEngines": hub.list_engines(),
        }.items():
            with pytest.raises(MeshError) as refused:
                await attempt
            found[name] = refused.value.reason
    return found


def test_another_user_of_this_machine_can_neither_end_a_run_nor_change_it(live_run: Run) -> None:
    run = live_run
    assert set(asyncio.run(refusals(run)).values()) == {Reason.UNAUTHENTICATED}
    for path in ("/update_weights", "/follow_hub", "/v1/completions"):
        assert engine_status(run, path, {"port": 1}) == 401, path
    folder = run.output_dir / "credentials"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes.pop("credentials") == 0o700
    assert set(modes) >= {"operator.token", "engine.key", "trust.sqlite"}
    assert set(modes.values()) == {0o600}
    secrets = [run.secret("operator.token"), run.secret("engine.key")]
    for path in [*(run.output_dir / "configs").iterdir(), *(run.output_dir / "logs").glob("*.log"), run.console]:
        assert not any(secret in path.read_text() for secret in secrets), path


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_reads_changes_and_stops_nothing(live_run: Run, planted: list[Path]) -> None:
    """MESHRL_TRIES_LOG names a file that the tries, and how they ended, are appended to."""
    run, out = live_run, live_run.output_dir
    tries = Attempts("by another user of the machine, while root's run goes on")
    tries.control("a run, beside folders with names that could be guessed", True, f"{len(run.steps())} steps")
    memory = versions_folder(out)
    assert [folder for folder in planted if list(folder.iterdir())] == []

    paths = files_of(out) + files_of(memory)
    paths += [
        each
        for folder in Path("/tmp").glob("meshrl-*")
        if folder not in planted and folder.stat().st_uid == 0
        for each in files_of(folder)
    ]
    assert len(paths) > 30
    assert {stat.S_IMODE(os.stat(path).st_mode) & 0o077 for path, _ in files_of(out) if os.path.exists(path)} == {0}
    told = iter(as_other_user(lambda: ends(paths)))
    for path, _ in paths:
        for kind in ("read", "replace"):
            said = next(told)
            tries.refused(f"{kind} {path}", said == "", said)

    secrets = [path.read_text().strip().encode() for path in (out / "credentials").glob("*.token")]
    secrets.append(run.secret("engine.key").encode())
    mine = [pid for pid in run.left_running() if os.path.exists(f"/proc/{pid}")]
    seen = as_other_user(lambda: [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in mine])
    found = [text for text in seen if any(secret.decode() in text for secret in secrets)]
    tries.refused("find a secret on a command line", bool(found), f"{len(mine)} command lines have none")
    for pid in mine:
        said = as_other_user(lambda pid=pid: ends([(f"/proc/{pid}/environ", False)]))[0]
        tries.refused(f"read the environment of process {pid}", said == "", said)

    trainer = run.pid("trainer")

    def stop() -> str:
        try:
            os.kill(trainer, signal.SIGTERM)
        except PermissionError as error:
            return str(error.strerror)
        return ""

    said = str(as_other_user(stop))
    tries.refused("stop the trainer", said == "", said)

    engine = run.port("inference")
    for key in ("", "guess", "operator.guess"):
        for route in ("/inference/v1/generate", "/v1/chat/completions", "/update_weights", "/follow_hub", "/pause"):
            ended = as_other_user(lambda key=key, route=route: posted(engine, route, key))
            tries.refused(f"post to the engine's {route} with the key {key!r}", *ended)
    forged = TokenCredentials("agent.0123456789abcdefghij")
    for shown, how in ((INSECURE, "no token"), (forged, "a token that is made up")):
        tries.refused(
            f"list the engines with {how}", *called(WeightSyncClient, run.port("weights"), "list_engines", shown)
        )
        tries.refused(f"ask the trainer with {how}", *called(TrainerClient, run.port("trainer"), "get_trainer", shown))
        tries.refused(
            f"list environments with {how}",
            *called(RolloutClient, run.port("rollout"), "list_environments", shown),
        )
    rollouts = TokenCredentials(run.secret("rollout.token"))
    sleeping = called(WeightSyncClient, run.port("weights"), "sleep_engines", rollouts, deadline_s=1.0)
    tries.refused("put engines to sleep with a worker's token", *sleeping)

    steps = len(run.steps())
    run.wait_for(lambda: len(run.steps()) > steps)
    tries.control("the run goes on", True, f"{len(run.steps())} steps")


def meshrl(run: Run, *arguments: str) -> Any:
    """What a command of the `meshrl` program prints for this run, read as JSON where it is."""
    done = subprocess.run(
        [sys.executable, "-m", "meshrl.cli.main", *arguments, "-o", str(run.output_dir)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) if "--json" in arguments or arguments[0] == "call" else done.stdout


def status_when_all_is_well(run: Run) -> Any:
    """One look may fall into the moment in which an engine takes a version, or a busy machine answers nobody."""
    command = [sys.executable, "-m", "meshrl.cli.main", "status", "--json", "-o", str(run.output_dir)]
    well = {
        "rollout": "serving",
        "trainer": "serving",
        "weights": "serving",
        "engine": "ready",
        "orchestrator": "running",
    }
    deadline = time.monotonic() + 120.0
    while True:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        status = json.loads(done.stdout)
        if done.returncode == 0 and {row["service"]: row["state"] for row in status["rows"]} == well:
            return status
        assert time.monotonic() < deadline, done.stdout
        time.sleep(0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at what processes have mapped")
def test_only_programs_that_compute_load_torch(live_run: Run) -> None:
    with_torch = {"trainer", "inference"}
    for program in PROGRAMS:
        mapped = Path(f"/proc/{live_run.pid(program)}/maps").read_text()
        assert ("libtorch" in mapped) == (program in with_torch), program
    fork_servers = children_of(live_run.pid("rollout"))
    workers = [worker for server in fork_servers for worker in children_of(server)]
    assert workers
    assert not [pid for pid in (*fork_servers, *workers) if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]


def children_of(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def test_the_meshrl_command_shows_a_live_run(live_run: Run) -> None:
    run = live_run
    status = status_when_all_is_well(run)
    assert status["step"] >= 1
    jsonschema.validate(status, json.loads(status_schema()))
    by_service = {row["service"]: row for row in status["rows"]}
    assert by_service["trainer"]["lag"] == 0
    newest, served = by_service["trainer"]["version"], by_service["engine"]["version"]
    assert by_service["engine"]["lag"] == max(0, newest - served)  # the hub may have been asked after the next version
    shown = meshrl(run, "watch", "--count", "1")
    assert f"127.0.0.1:{run.port('trainer')}" in shown
    engines = meshrl(run, "weights", "engines", "--json")
    urls = {f"http://127.0.0.1:{run.port(program)}" for program in ("inference", "inference_2")}
    assert {engine["url"] for engine in engines} == urls
    versions = meshrl(run, "weights", "list", "--json")
    assert {version["state"] for version in versions} >= {"committed"}
    assert {environment["name"] for environment in meshrl(run, "envs", "--json")} == ENVIRONMENTS
    assert meshrl(run, "call", "trainer", "GetTrainer", '{"contract_version": "1.0"}')["runs"][0]["run_id"] == "main"
    saved = meshrl(run, "trainer", "checkpoint", "--weights-only", "--json")
    assert (Path(saved["path"]) / "model.safetensors").exists()


def test_the_meshrl_command_looks_up_a_rollout_of_a_live_run(live_run: Run) -> None:
    run = live_run
    listed = meshrl(run, "rollouts", "tail", "--state", "trained", "-n", "1")
    rollout_id = listed.splitlines()[1].split()[0]
    story = meshrl(run, "rollouts", "show", rollout_id, "--json")
    assert story["state"] == "trained"
    assert re.fullmatch("[0-9a-f]{32}", story["trace_id"])
    assert isinstance(story["advantage"], float)
    assert story["group"]["group_id"] == story["group_id"]
    worst = meshrl(run, "rollouts", "worst", str(story["step"]), "--json")
    said = [message["role"] for message in worst["samples"][0]["messages"] if message["text"]]
    assert said[:2] == ["system", "user"]
    assert "rl.train" in meshrl(run, "trace", "show", str(story["step"]))
    assert "serving" in meshrl(run, "logs", "-s", "rollout", "-n", "1000")


@pytest.mark.parametrize("service", ["rollout", "trainer", "weights"])
def test_the_services_of_a_live_run_keep_the_contract_and_want_to_know_who_asks(live_run: Run, service: str) -> None:
    """Only the safe checks; those of what an operator may not call are left out."""
    run, address = live_run, f"127.0.0.1:{live_run.port(service)}"
    command = [sys.executable, "-m", "meshrl.cli.main", "conformance", "--address", address, "--service", service]
    known = subprocess.run([*command, "--json", "-o", str(run.output_dir)], capture_output=True, text=True, timeout=180)
    assert known.returncode == 0, known.stdout + known.stderr
    rules = json.loads(known.stdout)["rules"]
    assert sum(one["result"] == "keeps" for one in rules) >= 10
    assert all("role" in one["found"] or "--full" in one["found"] for one in rules if one["result"] == "not checked")
    if service == "rollout":
        unknown = subprocess.run([*command, "-o", "/nowhere"], capture_output=True, text=True, timeout=180)
        assert (unknown.returncode, unknown.stdout) == (2, "")
        assert "does not know who calls" in unknown.stderr


def second(run: Run, *flags: str) -> subprocess.CompletedProcess[str]:
    """The same `rl` once more, on the folder of `run`."""
    assert isinstance(run.process.args, list)
    command = [str(part) for part in run.process.args]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=240, env=environ())


def open_to_others(folder: Path) -> list[Path]:
    """What other users may read or write, of a folder and all that is in it."""
    found = []
    for path in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):  # of a run that goes on
            if not path.is_symlink() and path.stat().st_mode & 0o077:
                found.append(path)
    return found


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_second_rl_leaves_the_live_run_alone_which_leaves_nothing_once_it_is_killed(live_run: Run) -> None:
    run = live_run
    in_memory, configs = versions_folder(run.output_dir), contents(run.output_dir / "configs")
    assert in_memory.is_dir()
    assert open_to_others(run.output_dir) == open_to_others(in_memory) == []

    refused = second(run, "--clean-output-dir", "--seed", "7")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert f"{run.output_dir} is in use by rl (pid {run.process.pid} on " in refused.stderr
    assert contents(run.output_dir / "configs") == configs
    assert in_memory.is_dir()
    trained = len(run.steps())
    run.wait_for(lambda: len(run.steps()) >= trained + 2)

    run.process.send_signal(signal.SIGKILL)
    run.process.wait(60.0)
    after = second(run, "--dry-run", "--no-preflight", "--seed", "7")  # waits for the programs of the killed one
    assert after.returncode == 0, after.stderr
    assert "nothing was written" not in after.stdout
    assert "seed = 7" in (run.output_dir / "configs" / "trainer.toml").read_text()
    assert not run.left_running()
    assert not in_memory.exists()
