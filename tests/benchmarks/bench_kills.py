"""A run on reverse_text whose trainer and orchestrator are killed (-9) at random moments: it goes on, learns, and its
ledger adds up.

Usage: bench_kills.py [--model FOLDER] [--steps N] [--kills N] [--seed N] [--pause FROM TO] [--output-dir FOLDER]
The run checkpoints every second step and may restart each program. Prints a line a kill, then the reward curve and
the audit of the ledger; exits with 1 when the run fails, the audit finds a violation or the reward has not risen.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from bench_objectives import RECIPE, warm_up

from meshrl.launch.demo_report import EDGE_STEPS, curves, read_records

VICTIMS = ("trainer", "orchestrator")
READY_S = 240.0
FINISH_S = 1800.0


class Run:
    """One `rl` process; what it is doing is read from its files."""

    def __init__(self, model: Path, output_dir: Path, *, steps: int, kills: int) -> None:
        self.output_dir = output_dir
        self.console = output_dir.with_suffix(".console")
        flags = ["--model.name", model, "--max-steps", steps, "--output-dir", output_dir]
        flags += ["--ckpt.interval", 2, "--ckpt.keep-last", 2, "--restarts", kills + 1]
        command = [sys.executable, "-m", "meshrl.launch.main", "@", RECIPE, *map(str, flags)]
        with self.console.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def pid(self, program: str) -> int:
        """Of the program's latest process."""
        log = self.output_dir / "logs" / "rl.log"
        return int(re.findall(rf"started {program} \(pid (\d+)\)", log.read_text())[-1])

    def step(self) -> int:
        """The last step with a record."""
        path = self.output_dir / "metrics.jsonl"
        return max((step for step, _ in curves(read_records(path)).train), default=0) if path.exists() else 0

    def wait_for_first_step(self) -> None:
        """Ends the benchmark with the run's output when there is none in time."""
        end = time.monotonic() + READY_S
        while self.step() < 1:
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"no first step:\n{self.tail()}")
            time.sleep(0.2)

    def finish(self) -> int:
        """The exit code; 124 when the run hangs and had to be ended."""
        try:
            return self.process.wait(timeout=FINISH_S)
        except subprocess.TimeoutExpired:
            print(self.tail())
            return 124

    def tail(self) -> str:
        return "\n".join(self.console.read_text(errors="replace").splitlines()[-25:])


def killed(pid: int) -> bool:
    """False when it is dead already: it is being started again just now."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def kill_at_random(run: Run, kills: int, pause_s: list[float], source: random.Random) -> None:
    """Kills a victim after a random pause, so often; prints where the run stood."""
    for number in range(1, kills + 1):
        time.sleep(source.uniform(*pause_s))
        if run.process.poll() is not None:
            sys.exit(f"the run ended after {number - 1} kills; raise --steps:\n{run.tail()}")
        victim = source.choice(VICTIMS)
        while not killed(run.pid(victim)):
            time.sleep(0.1)
        print(f"kill {number:3d}  {victim:<14} at step {run.step()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a run's trainer and orchestrator at random moments.")
    parser.add_argument("--model", type=Path, help="where the run starts, such as outputs/demo/sft/weights/final")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, nargs=2, default=[4.0, 20.0], help="seconds between kills, from and to")
    parser.add_argument("--output-dir", type=Path, help="keep the run here")
    read = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = (read.model or warm_up(Path(folder) / "warm_up")).resolve()
        run = Run(model, (read.output_dir or Path(folder) / "run").resolve(), steps=read.steps, kills=read.kills)
        try:
            run.wait_for_first_step()
            kill_at_random(run, read.kills, read.pause, random.Random(read.seed))
            code = run.finish()
        finally:
            if run.process.poll() is None:
                run.process.terminate()
                run.process.wait(timeout=90)
        points = curves(read_records(run.output_dir / "metrics.jsonl"))
        rewards = [reward for _, reward in points.train]
        first, last = (sum(part) / len(part) for part in (rewards[:EDGE_STEPS], rewards[-EDGE_STEPS:]))
        print(f"exit code {code}; steps {run.step()}; training reward {first:.3f} -> {last:.3f}")
        if len(points.held_out) >= 2:
            print("held-out reward", " ".join(f"{step}:{reward:.3f}" for step, reward in points.held_out))
        audit = subprocess.run([sys.executable, "-m", "meshrl.orchestrator.audit", str(run.output_dir)], check=False)
    if code != 0 or audit.returncode != 0 or last <= first:
        sys.exit(1)


if __name__ == "__main__":
    main()
