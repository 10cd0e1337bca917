"""Every algorithm that an environment may have on reverse_text, from one warm-up: held-out reward before and after.

grpo runs longest, and what it makes is the teacher of opd; the table says after which step a run had 95% of the
teacher's reward for the first time. The warm-up is the demo's, made first unless a folder is named, and so is the
teacher. echo has no tools to expect here: it learns what users write (roles = ["user"]).

Usage: bench_algorithms.py [--student FOLDER] [--teacher FOLDER] [--teacher-steps N] [--steps N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshrl.launch import demo
from meshrl.launch.demo_report import curves, read_records

RECIPE = "configs/reverse_text/rl.toml"
DEADLINE_S = 1800.0
SHARE = 0.95
ALGORITHMS: Mapping[str, Sequence[str]] = {
    "opd": (),
    "sft": ("--orchestrator.teacher.model.name", "teacher"),
    "max_rl": (),
    "rae": (),
    "hierarchical_grpo": (),
    "echo": ("--orchestrator.algo.roles", "user", "--orchestrator.algo.weight", "0.01"),
    "opsd": ("--orchestrator.algo.context-tokens", "250", "--inference.max-model-len", "256"),
}
"""What each is given beside its name."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmRun:
    """One line of the table; `held_out` is the reward after each step that was evaluated."""

    name: str
    held_out: Sequence[tuple[int, float]]
    seconds: float

    def first_step(self, reward: float) -> int | None:
        """The first step after which the held-out reward was at least this."""
        return next((step for step, value in self.held_out if value >= reward), None)


def train(name: str, flags: Sequence[object], *, model: Path, steps: int, output_dir: Path) -> AlgorithmRun:
    """One whole run. Raises RuntimeError with the end of its output when it fails."""
    command = [sys.executable, "-m", "meshrl.launch.main", "@", RECIPE, "--model.name", model]
    command += ["--max-steps", steps, "--output-dir", output_dir, *flags]
    began_s = time.monotonic()
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=DEADLINE_S)
    if ended.returncode != 0:
        raise RuntimeError("\n".join((ended.stdout + ended.stderr).splitlines()[-15:]))
    held_out = curves(read_records(output_dir / "metrics.jsonl")).held_out
    return AlgorithmRun(name=name, held_out=held_out, seconds=time.monotonic() - began_s)


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[str]:
    """An engine with the teacher's weights; its URL, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "meshrl.inference.main", "--model.name", model, "--server.port", port]
    command += ["--max-model-len", 256, "--torch-threads", 1, "--output-dir", folder]
    with (folder / "teacher.log").open("w") as log:
        engine = subprocess.Popen([*map(str, command)], stdout=log, stderr=subprocess.STDOUT)
        try:
            give_up_at = time.monotonic() + 180.0
            while not answers(f"{url}/health"):
                if engine.poll() is not None or time.monotonic() > give_up_at:
                    raise RuntimeError(f"the teacher's engine did not start; see {folder / 'teacher.log'}")
                time.sleep(0.5)
            yield url
        finally:
            engine.terminate()
            engine.wait(60.0)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0):
            return True
    except (urllib.error.URLError, OSError):
        return False


def warm_up(folder: Path) -> Path:
    """The demo's own model and warm-up."""
    prepare, sft, _ = demo.stages(demo.parse(["--output-dir", str(folder)]))
    for stage in (prepare, sft):
        demo.run(stage, lambda line: None)
    return folder / "sft" / "weights" / "final"


def table(runs: Sequence[AlgorithmRun], teacher: float) -> str:
    lines = [
        f"teacher's held-out reward {teacher:.3f}; {SHARE:.0%} of it is {SHARE * teacher:.3f}",
        f"{'algorithm':<18} {'before':>7} {'after':>7} {'steps':>6} {'first step with 95%':>20} {'minutes':>8}",
    ]
    for run in runs:
        first = run.first_step(SHARE * teacher)
        lines.append(
            f"{run.name:<18} {run.held_out[0][1]:>7.3f} {run.held_out[-1][1]:>7.3f} {run.held_out[-1][0]:>6}"
            f" {'-' if first is None else first:>20} {run.seconds / 60:>8.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", type=Path, help="folder of the weights to begin with; made when left out")
    parser.add_argument(
        "--teacher", type=Path, help="output folder of a grpo run with a checkpoint; made when left out"
    )
    parser.add_argument("--teacher-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=sorted(ALGORITHMS), default=list(ALGORITHMS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student = given.student or warm_up(folder / "warm_up")
        runs = []
        source = given.teacher
        if source is None:
            source = folder / "grpo"
            flags = ["--ckpt.interval", given.teacher_steps]
            runs.append(train("grpo", flags, model=student, steps=given.teacher_steps, output_dir=source))
        held_out = curves(read_records(source / "metrics.jsonl")).held_out
        runs = runs or [AlgorithmRun(name="grpo", held_out=held_out, seconds=float("nan"))]
        weights = max((source / "weights").glob("step_*"), key=lambda path: int(path.name.partition("_")[2]))
        with serving(weights, folder) as url:
            for name in given.only:
                taught = ["--orchestrator.teacher.client.base-url", url] if name in ("opd", "sft") else []
                flags = ["--orchestrator.algo.type", name, *ALGORITHMS[name], *taught]
                flags += ["--orchestrator.eval.interval", 2]
                runs.append(train(name, flags, model=student, steps=given.steps, output_dir=folder / name))
                print(table(runs, held_out[-1][1]), flush=True)


if __name__ == "__main__":
    main()
