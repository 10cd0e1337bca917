"""A rollout program that is killed, also without torch or a known user: all that its environments started ends."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from local_ports import free_port
from meshrl.client import RolloutClient
from polling import until

START_S, DEADLINE_S = 300.0, 60.0
TASKSETS = Path(__file__).with_name("tasksets")
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # every import of it fails: a machine that only plays environments needs none
from meshrl.rollout.main import main
assert "transformers" not in sys.modules, "it is for the tokenizer alone, which is not loaded yet"
main()
"""


AS_UNKNOWN_USER = ["unshare", "-U", "--map-user=12345", "--map-group=12345"]
if shutil.which("unshare") is None or subprocess.run([*AS_UNKNOWN_USER, "true"], capture_output=True).returncode:
    AS_UNKNOWN_USER = []  # this system makes no user namespaces
ENTRY = "from meshrl.core.entry import rollout; rollout()"


@pytest.mark.skipif(sys.platform != "linux", reason="what left its session is found by /proc")
@pytest.mark.parametrize(
    ("workers", "start", "without"),
    [
        (0, [sys.executable, "-c", WITHOUT_TORCH], ()),
        # As in a container that is started with a user id of its own: no home, and no entry in passwd.
        (1, [*AS_UNKNOWN_USER, sys.executable, "-c", ENTRY], ("HOME", "USER", "LOGNAME")),
    ],
    ids=["without torch", "an unknown user"],
)
async def test_a_program_that_an_environment_started_ends_with_the_rollout_program(
    tmp_path, tokenizer_dir, engine, make_group, workers, start, without
):
    port, console = free_port(), tmp_path / "console.txt"
    command = [
        *start, "--output-dir", str(tmp_path / "out"), "--tokenizer",
        str(tokenizer_dir), "--renderer.name", "default", "--seq-len", "256", "--workers", str(workers),
        "--client.base-url", f"{engine.url}/v1/", "--env.0.id", "mesh_zoo", "--env.0.name", "keeps",
        "--env.0.args.kind", "keeps", "--env.0.args.seconds", "3600", "--env.1.id", "reverse_text",
        "--server.port", str(port), "--drain-deadline-s", "0.1",
    ]  # fmt: skip
    deep = tmp_path / ("scratch-" * 10)  # no Unix socket has so long a path
    deep.mkdir()
    with console.open("wb") as out, tempfile.TemporaryDirectory(dir="/tmp") as short:
        program = subprocess.Popen(  # noqa: ASYNC220  # its own pace, as a user's
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            env={
                **{name: value for name, value in os.environ.items() if name not in without},
                "PYTHONPATH": str(TASKSETS), "PYTHONUNBUFFERED": "1", "TMPDIR": str(deep), "XDG_RUNTIME_DIR": short,
            },
        )  # fmt: skip
        try:
            async with RolloutClient(f"127.0.0.1:{port}") as client:
                await client.wait_until_serving(START_S)
                rollout, _ = await _collect(client, make_group(environment="reverse_text", deadline_s=DEADLINE_S))
                assert 0.0 <= rollout.reward <= 1.0
                assert [path.stat().st_mode & 0o777 for path in deep.glob("meshrl-home-*")] == [0o700] * bool(
                    without and AS_UNKNOWN_USER
                )
                playing = asyncio.create_task(_collect(client, make_group(environment="keeps", deadline_s=DEADLINE_S)))
                started = await until(lambda: _started(tmp_path), DEADLINE_S)
                assert all(map(_runs, started))
                program.send_signal(signal.SIGKILL)
                await asyncio.to_thread(program.wait, DEADLINE_S)
                await asyncio.wait({playing})
            await until(lambda: not any(map(_runs, started)), DEADLINE_S)
            await until(lambda: not list(Path(short).iterdir()), DEADLINE_S)
        finally:
            program.kill()
            program.wait(DEADLINE_S)


async def _collect(client, request):
    return [event async for event in client.run_rollouts(request)]


def _started(folder: Path) -> list[int]:
    texts = [path.read_text(errors="replace") for pattern in ("*.txt", "*.log") for path in folder.rglob(pattern)]
    return [int(pid) for text in texts for pid in re.findall(r"left process (\d+)", text)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
