"""Every algorithm's preset on reverse_text from the same warm-up: held-out reward before and after, and what it took.

The runs start from the warm-up of the demo, which is made first unless a folder is named.
Usage: bench_objectives.py [--model FOLDER] [--steps N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.launch import demo
from meshrl.launch.config.presets import PRESETS
from meshrl.launch.demo_report import EDGE_STEPS, ReportError, curves, read_records
from meshrl.wire.values import JsonObject

RECIPE = "configs/reverse_text/rl.toml"
DEADLINE_S = 900.0
SHOWN_LOG_LINES = 15


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; `masked` is the share of sampled tokens without a policy gradient."""

    before: float
    after: float
    first: float
    last: float
    masked: float
    gap: float
    seconds: float


class RunFailedError(Exception):
    """A run ended with an error; the message holds the end of its output."""


def train(name: str, *, model: Path, steps: int, output_dir: Path) -> Row:
    """One whole run. Raises RunFailedError, or ReportError when it lacks an evaluation."""
    command = [sys.executable, "-m", "meshrl.launch.main", "@", RECIPE]
    flags = ["--algorithm", name, "--model.name", model, "--max-steps", steps, "--output-dir", output_dir]
    started = time.monotonic()
    ended = subprocess.run([*command, *map(str, flags)], capture_output=True, text=True, timeout=DEADLINE_S)
    if ended.returncode != 0:
        lines = (ended.stdout + ended.stderr).splitlines()[-SHOWN_LOG_LINES:]
        raise RunFailedError("\n".join(lines))
    return measure(read_records(output_dir / "metrics.jsonl"), time.monotonic() - started)


def measure(records: Sequence[JsonObject], seconds: float) -> Row:
    """The figures of a finished run. Raises ReportError when it was not evaluated at both ends."""
    points = curves(records)
    if len(points.held_out) < 2:
        raise ReportError("the run has no evaluation before and after its steps")
    rewards = [reward for _, reward in points.train]
    first, last = rewards[:EDGE_STEPS], rewards[-EDGE_STEPS:]
    return Row(
        before=points.held_out[0][1],
        after=points.held_out[-1][1],
        first=sum(first) / len(first),
        last=sum(last) / len(last),
        masked=_mean(records, "masked_advantage_positive/mean") + _mean(records, "masked_advantage_negative/mean"),
        gap=_mean(records, "mismatch_abs/all/mean"),
        seconds=seconds,
    )


def _mean(records: Sequence[JsonObject], name: str) -> float:
    values = [float(record[name]) for record in records if record.get(name) is not None]
    return sum(values) / len(values) if values else float("nan")


def warm_up(folder: Path) -> Path:
    """The demo's own model and warm-up."""
    prepare, sft, _ = demo.stages(demo.parse(["--output-dir", str(folder)]))
    for stage in (prepare, sft):
        demo.run(stage, lambda line: None)
    return folder / "sft" / "weights" / "final"


def compare(names: Sequence[str], *, model: Path, steps: int) -> list[str]:
    """Prints the table, a row an algorithm; returns the names of those whose run failed."""
    failed = []
    print("| objective | reward before | after | gain | train first 5 | last 5 | masked | mean abs logprob gap | s |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = train(name, model=model, steps=steps, output_dir=Path(folder) / "run")
            except (RunFailedError, ReportError, subprocess.TimeoutExpired) as error:
                failed.append(name)  # the others say something all the same
                sys.stderr.write(f"{name}: {error}\n")
                continue
        print(
            f"| {name} | {row.before:.3f} | {row.after:.3f} | {row.after - row.before:+.3f} | {row.first:.3f} "
            f"| {row.last:.3f} | {row.masked:.4f} | {row.gap:.1e} | {row.seconds:.0f} |",
            flush=True,
        )
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the algorithms' presets on reverse_text.")
    parser.add_argument("--model", type=Path, help="where the runs start, such as outputs/demo/sft/weights/final")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run (default 60)")
    parser.add_argument("--only", nargs="+", choices=sorted(PRESETS), default=list(PRESETS), help="default: all")
    read = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = read.model or warm_up(Path(folder))
        failed = compare(read.only, model=model.resolve(), steps=read.steps)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
