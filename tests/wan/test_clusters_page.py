"""The commands of docs/clusters.md as printed, between network namespaces and with TLS: a box behind a NAT plays.

Its worker is killed and started again."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ledger_audit import audit
from mesh_run import RUN_TOML
from meshrl_examples.model import create_model
from wan_rig import PERFECT, Line, Wan, open_wan

pytestmark = pytest.mark.timeout(900)

PAGE = (Path(__file__).parents[2] / "docs/clusters.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
UP_S, END_S = 300.0, 60.0
SMALL = {  # what a small model and two cores ask for
    "rl": ["--max-steps", "5"],
    "rollout": ["--workers", "0", "--seq-len", "128"],
}


class Site:
    """A host of the page: its namespace and its folder."""

    def __init__(self, wan: Wan, name: str, folder: Path, words: dict[str, str]) -> None:
        self._wan, self._name, self._words = wan, name, words
        self.folder = folder
        folder.mkdir()

    def start(self, command: str, **changes: str) -> tuple[subprocess.Popen[str], Path]:
        """Starts a command of the page; its words in capitals are what the reader puts there. Returns its output."""
        for word, value in (self._words | changes).items():
            command = command.replace(word, value)
        words = shlex.split(command)
        given = dict(word.split("=", 1) for word in words if re.match(r"MESHRL_\w+=", word))
        program, *arguments = [word for word in words if not re.match(r"MESHRL_\w+=", word)]
        if [program, *arguments[:1]] == ["uv", "run"]:
            program, *arguments = arguments[1:]
            program, arguments = str(Path(sys.executable).with_name(program)), [*arguments, *SMALL.get(program, [])]
        console = self.folder / f"{Path(program).name}_{time.monotonic_ns()}.txt"
        environ = {name: value for name, value in os.environ.items() if name != "MESHRL_API_KEY"}
        with console.open("wb") as out:
            return self._wan.start(
                self._name, [program, *arguments], cwd=self.folder, stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, env=environ | {"COLUMNS": "200"} | given,
            ), console  # fmt: skip

    def run(self, command: str, **changes: str) -> str:
        """The output of a command that ends well."""
        process, console = self.start(command, **changes)
        assert process.wait(END_S) == 0, console.read_text()
        return console.read_text()


def until(holds: Callable[[], object], process: subprocess.Popen[str], console: Path) -> None:
    end = time.monotonic() + UP_S
    while not holds():
        assert process.poll() is None, console.read_text()
        assert time.monotonic() < end, console.read_text()
        time.sleep(0.2)


def test_a_box_behind_a_nat_plays_a_run_by_the_commands_of_the_page_though_it_is_killed(tmp_path: Path) -> None:
    blocks = [body.replace("\\\n", " ") for language, body in BLOCKS if language == "bash"]
    (init, rl), (token, key), (join, rollout) = (block.strip().splitlines() for block in blocks)
    (toml,) = (body for language, body in BLOCKS if language == "toml")
    create_model(tmp_path / "model", seed=0)
    model = str(tmp_path / "model")
    with open_wan({"run": PERFECT, "home": Line(nat=True, delay_s=0.02)}) as wan:
        words = {"RUN_HOST": wan.addresses["run"], "Qwen/Qwen3-0.6B": model}
        host, box = Site(wan, "run", tmp_path / "host", words), Site(wan, "home", tmp_path / "box", words)
        (host.folder / "rl.toml").write_text(f'[model]\nname = "{model}"\n' + RUN_TOML)
        (host.folder / "workers.toml").write_text(toml.replace("RUN_HOST", wan.addresses["run"]))
        host.run(init)
        running, console = host.start(rl)
        output_dir = host.folder / "outputs/mine"

        def log(name: str) -> str:
            path = output_dir / "logs" / f"{name}.log"
            return path.read_text() if path.exists() else ""

        until(lambda: "registered at https" in log("weights"), running, console)
        printed = dict(line.split(None, 1) for line in host.run(token).splitlines())
        told = {"ID.SECRET": printed["token"].strip(), "sha256:HEX": printed["ca-hash"].strip()}
        box.run(join, **told)

        def trained() -> list[int]:
            file = output_dir / "metrics.jsonl"
            steps = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
            return [step["step"] for step in steps if "reward/all/mean" in step]

        told["=KEY"] = f"={host.run(key).strip()}"
        worker, played = box.start(rollout, **told)
        until(trained, worker, played)
        worker.kill()  # what it played is in its spool, and is neither lost nor booked twice
        worker.wait(END_S)
        worker, played = box.start(rollout, **told)
        until(lambda: running.poll() is not None, worker, played)
        assert running.wait(END_S) == 0, console.read_text()
        worker.terminate()
        assert len(re.findall(r"worker '\S+' dialled in", log("orchestrator"))) == 2
    assert trained() == [1, 2, 3, 4, 5]
    report = audit(output_dir)
    assert report.violations == (), report.table()
    assert not [reason for state, reason in report.counts if state == "failed"], report.table()
