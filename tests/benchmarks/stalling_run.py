"""A run that `bench_stalls` brings to a stop: the programs, ways to harm them, and what log, CLI and page say."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshrl.wire.program_state import read_states

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "reverse_text" / "rl.toml"
SMALL_DISK_MIB = 128
SLOW_BYTES_S = 4000
START_S, END_S = 400.0, 60.0
BLOCKS_ITS_LOOP = """
import os, signal, time
signal.signal(signal.SIGUSR2, lambda *_: time.sleep(600))
"""
"""For sitecustomize: a signal then blocks the main thread of whichever program it is sent to."""


class StallingRun:
    """One `rl`, or the five programs by hand with a link between engine and hub that can be slowed down."""

    def __init__(self, model: Path, folder: Path, *, flags: tuple[str, ...], by_hand: bool, small_disk: bool) -> None:
        self._folder, self._model, self._flags, self._by_hand = folder, model, flags, by_hand
        self.output_dir = folder / "run"
        self._marks = folder / "marks"
        self._disk = self.output_dir if small_disk else None
        self._started: list[subprocess.Popen[bytes]] = []
        self._read: dict[Path, int] = {}
        self._link: SlowLink | None = None
        self.page_url = ""

    def __enter__(self) -> Self:
        for made in (self.output_dir, self._marks, self._folder / "site"):
            made.mkdir()
        if self._disk is not None:
            size = f"size={SMALL_DISK_MIB}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self._disk)], check=True)
        (self._folder / "site" / "sitecustomize.py").write_text(BLOCKS_ITS_LOOP)
        try:
            (self._start_by_hand if self._by_hand else self._start_rl)()
            self._start_page()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for state in read_states(self.output_dir).values():
            with suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGCONT)
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # rl's guardian ends its programs
            process.wait(END_S)
        if self._link is not None:
            self._link.close()
        deadline_s = time.monotonic() + END_S
        while any(_is_alive(state.pid) for state in read_states(self.output_dir).values()):
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.2)
        if self._disk is not None:
            subprocess.run(["umount", "--lazy", str(self._disk)], check=False)

    # --- start ------------------------------------------------------------------------------------

    def _start_rl(self) -> None:
        self._start("rl", ["-m", "meshrl.launch.main", "@", str(RECIPE), "@", str(self._overlay()), *self._flags])

    def _overlay(self) -> Path:
        path = self._folder / "stalls.toml"
        nan = f'[trainer.loss]\nkwargs = {{ folder = "{self._marks}" }}\n' if "custom" in self._flags else ""
        path.write_text(
            f'output_dir = "{self.output_dir}"\nmax_steps = 100000\n[model]\nname = "{self._model}"\n'
            "[trainer.optim]\nlr = 1e-5\n[orchestrator]\nbatch_size = 32\nfilters = { zero_signal = false }\n"
            f'[[orchestrator.train.env]]\nid = "bench_stalling"\nargs = {{ folder = "{self._marks}" }}\n{nan}'
            "[orchestrator.eval]\ninterval = 1000000\nnum_examples = 8\n"
        )
        return path

    def _start_by_hand(self) -> None:
        """The programs of a run as `rl` would start them, but for the link between the engine and its hub."""
        asked = [sys.executable, "-m", "meshrl.launch.main", "@", str(RECIPE), "@", str(self._overlay()), *self._flags]
        environ = self._environ()
        subprocess.run([*asked, "--dry-run"], check=True, env=environ, timeout=START_S, stdout=subprocess.DEVNULL)
        configs = self.output_dir / "configs"
        hub = tomllib.loads((configs / "weights.toml").read_text())["server"]
        self._link = SlowLink(hub["port"])
        for name in ("weights", "inference", "trainer", "rollout", "orchestrator"):
            more = ["--weight-broadcast.address", f"127.0.0.1:{self._link.port}"] if name == "inference" else []
            self._start(name, ["-m", f"meshrl.{name}.main", "@", str(configs / f"{name}.toml"), *more])

    def _environ(self) -> dict[str, str]:
        found = os.environ.get("PYTHONPATH", "")
        paths = [str(self._folder / "site"), str(ROOT / "tests" / "benchmarks" / "tasksets"), found]
        return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def _start(self, name: str, arguments: list[str]) -> None:
        with (self._folder / f"{name}.console").open("wb") as out:
            self._started.append(
                subprocess.Popen(
                    [sys.executable, *arguments], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    env=self._environ(), start_new_session=True,
                )
            )  # fmt: skip

    def _start_page(self) -> None:
        deadline_s = time.monotonic() + START_S
        while not (self.output_dir / "configs").exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        console = self._folder / "page.console"
        self._start("page", ["-m", "meshrl.cli.main", "ui", str(self.output_dir), "--port", "0"])
        while not (said := re.search(r"open (\S+)", console.read_text())) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert said, f"the page does not come up: {console.read_text()} {(self._folder / 'rl.console').read_text()}"
        self.page_url = said[1]

    def wait_for_steps(self, steps: int, most_s: float) -> None:
        """Returns once as many steps have ended, or, for none, once all programs are up."""
        deadline_s = time.monotonic() + most_s
        while time.monotonic() < deadline_s:
            if self._started[0].poll() is not None:
                break
            path = self.output_dir / "metrics.jsonl"
            ended = path.read_text().count('time/step"') if path.exists() else 0
            if ended >= steps and (steps or self._is_up()):
                return
            time.sleep(0.2)
        raise RuntimeError(f"the run does not begin: {(self._folder / 'rl.console').read_text()[-3000:]}")

    def steps_ended(self) -> int:
        """Steps that have a record."""
        path = self.output_dir / "metrics.jsonl"
        return path.read_text().count('time/step"') if path.exists() else 0

    def _is_up(self) -> bool:
        """Whether the programs run, and the trainer has its model."""
        states = read_states(self.output_dir)
        if not {"orchestrator", "rollout", "trainer", "weights"} <= states.keys():
            return False
        return all(wait.name != "start" for wait in states["trainer"].waits)

    # --- harm -------------------------------------------------------------------------------------

    def stop(self, program: str) -> None:
        os.kill(read_states(self.output_dir)[program].pid, signal.SIGSTOP)

    def kill(self, program: str) -> None:
        states = read_states(self.output_dir)
        os.kill(states[program].pid, signal.SIGKILL)

    def block_loop(self, program: str) -> None:
        os.kill(read_states(self.output_dir)[program].pid, signal.SIGUSR2)

    def mark(self, name: str) -> None:
        (self._marks / name).touch()

    def fill_disk(self) -> None:
        with suppress(OSError), (self.output_dir / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))

    def slow_down(self) -> None:
        assert self._link is not None, "by hand"
        self._link.bytes_s = SLOW_BYTES_S

    # --- look -------------------------------------------------------------------------------------

    def new_log_lines(self) -> list[str]:
        """What the logs and the console have got since the last look."""
        lines = []
        for path in [*self.output_dir.glob("logs/attempt_*/**/*.log"), *self._folder.glob("*.console")]:
            if path.name == "page.console":
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            self._read[path] = self._read.get(path, 0) + len(text)
            lines += [f"{path.name}: {line}" for line in text.decode(errors="replace").splitlines()]
        return lines

    def cli(self) -> dict[str, Any]:
        """What `meshrl status --json` prints."""
        command = [sys.executable, "-m", "meshrl.cli.main", "status", "--json", "-o", str(self.output_dir)]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
        assert printed.stdout, f"meshrl status says nothing: {printed.stderr[-2000:]}"
        found: dict[str, Any] = json.loads(printed.stdout)
        return found

    def page(self) -> dict[str, Any]:
        """What the view Now fetches."""
        with urllib.request.urlopen(f"{self.page_url}api/runs/0/now", timeout=60.0) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class SlowLink:
    """Forwards TCP connections to a port of this host; what comes back from there can be slowed down."""

    def __init__(self, port: int) -> None:
        self.bytes_s: int | None = None
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                caller, _ = self._server.accept()
                try:
                    callee = socket.create_connection(("127.0.0.1", self._to), timeout=END_S)
                except OSError:  # not up yet: who calls calls again
                    caller.close()
                    continue
                callee.settimeout(None)
                for ends, slow in (((caller, callee), False), ((callee, caller), True)):
                    threading.Thread(target=self._forward, args=(*ends, slow), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                at = 0
                while at < len(data):
                    rate = self.bytes_s if slow else None
                    part = data[at : at + (len(data) if rate is None else max(1, rate // 10))]
                    target.sendall(part)
                    at += len(part)
                    if rate is not None:
                        time.sleep(0.1)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
