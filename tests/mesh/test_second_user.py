"""Another user of the machine tries a run that root has started: its files, memory, programs and ports; all is refused.

MESHRL_TRIES_LOG names a file that the tries, and how they ended, are appended to.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from attempts import Attempts
from mesh_run import Run
from meshrl.client import ChannelOptions, RolloutClient, TrainerClient, WeightSyncClient
from meshrl.client.channel import ServiceClient
from meshrl.client.credentials import INSECURE, Credentials, TokenCredentials
from meshrl.core.private_folders import SHM, versions_folder
from meshrl.wire.errors import MeshError, Reason

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user"),
]
OTHER = 65534
"""The user `nobody`."""


def as_other_user(work: Callable[[], object]) -> Any:
    """What `work` returns, as JSON carries it, in a process of the other user."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            os.write(writes, json.dumps(work()).encode())
        except BaseException as error:  # noqa: BLE001  # it is told, and the process ends
            os.write(writes, json.dumps(f"it failed: {error!r}").encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return json.loads(told)


def ends(paths: Sequence[tuple[str, bool]]) -> list[str]:
    """How reading and replacing each path (whether it is a folder) ends; empty for a try that succeeded."""
    ended = []
    for path, is_folder in paths:
        for kind in ("read", "write"):
            try:
                if is_folder and kind == "read":
                    os.listdir(path)
                elif is_folder:
                    Path(path, "planted").touch()
                else:
                    os.close(os.open(path, os.O_RDONLY if kind == "read" else os.O_WRONLY))
                ended.append("")
            except OSError as error:
                ended.append(f"{error.strerror}")
    return ended


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that others may enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # a run of a test that failed still writes


def files_of(folder: Path) -> list[tuple[str, bool]]:
    return [(str(path), path.is_dir()) for path in (folder, *folder.rglob("*")) if not path.is_symlink()]


def posted(port: int, route: str, key: str) -> tuple[bool, str]:
    """Whether an engine takes a request with this key, and what it answers."""
    shown = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.socket() as connection:
        connection.settimeout(30.0)
        connection.connect(("127.0.0.1", port))
        connection.sendall(f"{head}{shown}Content-Length: 2\r\n\r\n{{}}".encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
    status, body = answer.split()[1].decode(), answer.partition(b"\r\n\r\n")[2].decode()
    return status not in ("401", "403"), f"{status} {body}"


def called(
    kind: type[ServiceClient], port: int, method: str, credentials: Credentials, **arguments: object
) -> tuple[bool, str]:
    """Whether a service of the run takes a call with these credentials, and what it answers."""

    async def call() -> tuple[bool, str]:
        options = ChannelOptions(credentials=credentials, retry_attempts=2)
        async with kind(f"127.0.0.1:{port}", options) as client:
            try:
                return True, str(await getattr(client, method)(**arguments))
            except MeshError as error:
                return error.reason not in (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED), str(error)

    return asyncio.run(call())


def test_another_user_of_the_machine_reads_changes_and_stops_nothing(
    start_run: Callable[..., Run], place: Path
) -> None:
    tries, out = Attempts("by another user of the machine, while root's run goes on"), place / "out"
    name = hashlib.blake2s(str(out.absolute()).encode(), digest_size=6).hexdigest()
    planted = [SHM / f"meshrl-0-{name}", SHM / "meshrl-spool-127.0.0.1_8000", Path("/tmp/meshrl-spool-127.0.0.1_8000")]
    as_other_user(
        lambda: [os.makedirs(folder, 0o777, exist_ok=True) for folder in planted]
    )  # names that could be guessed
    try:
        run = start_run("--max-steps", "500", "--weights.transport", "filesystem", output_dir=out)
        run.wait_for(lambda: len(run.steps()) >= 1)
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
            tries.refused(
                f"ask the trainer with {how}", *called(TrainerClient, run.port("trainer"), "get_trainer", shown)
            )
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
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 0, run.console.read_text()
    finally:
        for folder in planted:
            shutil.rmtree(folder)


def test_an_output_folder_that_another_user_has_made_is_refused(start_run: Callable[..., Run], place: Path) -> None:
    tries, out = Attempts("with an output folder that another user has made"), place / "out"
    out.mkdir()
    os.chown(out, OTHER, OTHER)
    run = start_run("--dry-run", output_dir=out)
    code = run.finish()
    said = run.console.read_text()
    tries.refused("have a run write to a folder of another user", code == 0, said)
    assert f"belongs to user {OTHER}, who could read and replace what this user (0) writes there" in said
    assert list(out.iterdir()) == []
    dry = subprocess.run([*map(str, run.process.args), "--readable-by", "everyone"], capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
