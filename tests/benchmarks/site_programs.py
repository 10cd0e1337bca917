"""The programs of a site of `bench_sites`: a relay, an engine and a rollout worker that listens nowhere."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from wan_rig import Wan

HUB, EXCHANGE, ENTRY, RELAY, ENGINE = 50053, 50054, 50060, 5001, 8000
START_S, END_S = 600.0, 180.0


@dataclass
class Program:
    """One program at a site, or at the origin, which may be started again."""

    wan: Wan
    site: str
    name: str
    command: list[str]
    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> None:
        with (self.folder / f"{self.name}_{len(self.started)}.txt").open("w") as console:
            self.started.append(
                self.wan.start(
                    self.site, [sys.executable, "-m", *self.command], stdin=subprocess.DEVNULL, stdout=console,
                    stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
                )
            )  # fmt: skip

    def send(self, signum: signal.Signals) -> None:
        self.started[-1].send_signal(signum)

    def wait(self, deadline_s: float) -> int:
        return self.started[-1].wait(deadline_s)

    def console(self) -> str:
        return (self.folder / f"{self.name}_{len(self.started) - 1}.txt").read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return bool(self.started) and self.started[-1].poll() is None


class Site:
    """A host with a relay, an engine and a rollout worker; its folder is its own disk."""

    def __init__(self, wan: Wan, name: str, model: Path, folder: Path, run: Path, dtype: str) -> None:
        self.name, self.folder, self._wan, self._run = name, folder, wan, run
        self.origin, self.address = wan.addresses["origin"], wan.addresses[name]
        shutil.copytree(model, folder / "model")
        key = folder / "engine.key"
        key.write_text(secrets.token_hex(16))
        at = ["--output-dir", str(folder)]
        here = ["--model.name", str(folder / "model"), *at]
        computes = ["--model.dtype", dtype, "--torch-threads", "1"]
        engine = ["--server.host", self.address, "--server.port", str(ENGINE), "--api-key-file", str(key)]
        versions = ["--weight-broadcast.type", "stream", "--weight-broadcast.address", f"{self.origin}:{HUB}"]
        relay = ["--upstream", f"{self.origin}:{HUB}", "--server.port", str(RELAY)]
        worker = ["--exchange.address", f"{self.origin}:{EXCHANGE}", "--exchange.name", f"worker-{name}"]
        client = ["--client.base-url", f"https://{self.address}:{ENGINE}", "--client.api-key-file", str(key)]
        commands = {
            "relay": ["meshrl.weights.main", *relay, *at, *self._tls("relay")],
            "engine": [
                "meshrl.inference.main", *engine, *versions, "--weight-broadcast.relays", f"127.0.0.1:{RELAY}",
                "--engine", "embedded", "--max-model-len", "128", *computes, *here, *self._tls("engine"),
            ],
            "worker": [
                "meshrl.rollout.main", *worker, *client, "--client.failover-s", "180", "--env.0.id", "reverse_text",
                "--seq-len", "128", "--workers", "0", *here, *self._tls("worker"),
            ],
        }  # fmt: skip
        self.programs = {program: Program(wan, name, program, command, folder) for program, command in commands.items()}

    def _tls(self, program: str) -> list[str]:
        return ["--tls.folder", str(self.folder / f"credentials_{program}")]

    def join(self) -> None:
        """Enrols its programs over the bad line, with a token each, and starts them."""
        for program, role in (("relay", "relay"), ("engine", "agent"), ("worker", "rollout")):
            made = meshrl("token", "create", "-o", str(self._run), "--role", role, "--ttl", "10m")
            token, ca_hash = re.findall(r"(?m)^(?:token|ca-hash) +(\S+)$", made)
            command = [
                sys.executable, "-m", "meshrl.cli.main", "join", f"{self.origin}:{ENTRY}", "--ca-hash", ca_hash,
                "--name", f"{program}-{self.name}", "--host", self.address,
                "--folder", str(self.folder / f"credentials_{program}"),
            ]  # fmt: skip
            joining = self._wan.start(
                self.name, command, env={**os.environ, "MESHRL_JOIN_TOKEN": token}, stdout=subprocess.DEVNULL
            )
            if joining.wait(START_S) != 0:
                raise RuntimeError(f"{program} of site {self.name} could not join")
        self.start(*self.programs)

    def start(self, *names: str) -> None:
        for name in names:
            self.programs[name].start()

    def lose_versions(self) -> None:
        """Its disk has none of the versions that came any more."""
        shutil.rmtree(self.folder / "weight_relay")

    def send(self, signum: signal.Signals, *names: str) -> None:
        for name in names:
            self.programs[name].send(signum)
        if signum == signal.SIGKILL:
            for name in names:
                self.programs[name].wait(END_S)


def meshrl(*arguments: str) -> str:
    command = [sys.executable, "-m", "meshrl.cli.main", *arguments]
    return subprocess.run(command, check=True, timeout=START_S, capture_output=True, text=True).stdout
