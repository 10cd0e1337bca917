"""One run under a storm: its `rl` process, when its steps are completed, and the health of its programs."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_load import is_healthy
from meshrl.launch.ports import FreePorts
from meshrl.wire.growing_file import GrowingFile

END_S = 180.0
POLL_S = 0.05
ENDLESS = 1_000_000


class StormError(Exception):
    """The storm cannot go on; the message says why."""


class Steps:
    """Follows metrics.jsonl on a thread: when each step was completed, steps that were done again included."""

    def __init__(self, path: Path) -> None:
        self._metrics = GrowingFile(path)
        self._lock = threading.Lock()
        self._times: list[float] = []
        self._newest = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(10.0)

    @property
    def newest(self) -> int:
        """The highest step with a record."""
        with self._lock:
            return self._newest

    def times(self) -> list[float]:
        with self._lock:
            return list(self._times)

    def usual_s(self) -> float:
        """The median time between two steps."""
        return statistics.median(after - before for before, after in itertools.pairwise(self.times()))

    def since(self, at_s: float) -> int:
        """Steps completed after a time."""
        return sum(done > at_s for done in self.times())

    def longest_gap_s(self, since_s: float) -> float:
        """From the last completed step before `since_s` on, up to now."""
        times = self.times()
        before = [done for done in times if done <= since_s]
        points = [before[-1] if before else since_s, *(done for done in times if done > since_s)]
        return max((after - earlier for earlier, after in itertools.pairwise(points)), default=0.0)

    def _follow(self) -> None:
        while not self._ended.wait(POLL_S):
            records = [json.loads(line) for line in self._metrics.read_on()]
            done = [int(record["step"]) for record in records if "time/step" in record]
            with self._lock:
                self._times += [time.monotonic()] * len(done)
                self._newest = max([self._newest, *done])


class Run:
    """One `rl` process and its programs; what they do is read from files and asked of their health."""

    def __init__(self, model: Path, output_dir: Path, *, transport: str, restarts: int, flags: list[str]) -> None:
        self.output_dir = output_dir
        self.console = output_dir.with_name(output_dir.name + ".console")
        self._ports = FreePorts()  # held, so that a restarted orchestrator gets it again
        self._orchestrator_port = self._ports("127.0.0.1")
        given = ["--model.name", model, "--max-steps", ENDLESS, "--output-dir", output_dir]
        given += ["--ckpt.interval", 2, "--ckpt.keep-last", 2, "--restarts", restarts]
        given += ["--weights.transport", transport, "--orchestrator.server.port", self._orchestrator_port, *flags]
        command = [sys.executable, "-m", "meshrl.launch.main", "@", "configs/reverse_text/rl.toml", *map(str, given)]
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        with self.console.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.steps = Steps(output_dir / "metrics.jsonl")

    def _log(self) -> str:
        path = self.output_dir / "logs" / "rl.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def pid(self, program: str) -> int:
        """Of the program's latest process."""
        return int(re.findall(rf"started {program} \(pid (\d+)\)", self._log())[-1])

    def starts(self) -> Counter[str]:
        """How often each program was started."""
        return Counter(re.findall(r"started (\w+) \(pid \d+\)", self._log()))

    def is_ready(self, program: str) -> bool:
        """Whether its health says that it serves."""
        if program == "orchestrator":
            return _serves(self._orchestrator_port)
        port = tomllib.loads((self.output_dir / "configs" / f"{program}.toml").read_text())["server"]["port"]
        return is_healthy(f"http://127.0.0.1:{port}") if program == "inference" else _serves(port)

    def wait(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Raises StormError when the run ends, or it takes longer than `deadline_s`."""
        end = time.monotonic() + deadline_s
        while not condition():
            if self.process.poll() is not None:
                raise StormError(f"the run ended with exit code {self.process.returncode} while waiting for {what}")
            if time.monotonic() > end:
                raise StormError(f"no {what} within {deadline_s:g} s")
            time.sleep(POLL_S)

    def end(self) -> int:
        """Asks it to end; the exit code, 124 when it hangs and has to be killed."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its guardian ends the programs
            self.process.wait()
            return 124
        finally:
            self.steps.close()
            self._ports.close()

    def tail(self) -> str:
        return "\n".join(self.console.read_text(errors="replace").splitlines()[-25:])


def _serves(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with suppress(grpc.RpcError):
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
    return False
