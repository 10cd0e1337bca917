"""The reverse_text run at max_async_level 0, 1 and 2 from the same warm-up: reward, wall time and staleness of each.

The runs start from the warm-up of the demo, which is made first unless a folder is named.
Usage: bench_async_levels.py [--model FOLDER] [--steps N]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshrl.launch import demo
from meshrl.launch.demo_report import read_records

LEVELS = (0, 1, 2)
DEADLINE_S = 900.0
EVAL = "eval/reverse_text_held_out/avg@1"


def train(level: int, *, model: Path, steps: int, output_dir: Path) -> list[dict[str, Any]]:
    """One whole run; returns its records."""
    command = [sys.executable, "-m", "meshrl.launch.main", "@", "configs/reverse_text/rl.toml"]
    flags = ["--model.name", model, "--max-steps", steps, "--max-async-level", level, "--output-dir", output_dir]
    subprocess.run([*command, *map(str, flags)], stdout=subprocess.DEVNULL, timeout=DEADLINE_S, check=True)
    return list(read_records(output_dir / "metrics.jsonl"))


def warm_up(folder: Path) -> Path:
    """The demo's own model and warm-up."""
    options = demo.parse(["--output-dir", str(folder)])
    prepare, sft, _ = demo.stages(options)
    for stage in (prepare, sft):
        demo.run(stage, lambda line: None)
    return folder / "sft" / "weights" / "final"


def compare(model: Path, steps_each: int) -> None:
    """Prints the table, a row a level."""
    print("| max_async_level | reward before | reward after | wall s | s/step | staleness max | mean abs logprob gap |")
    print("|---|---|---|---|---|---|---|")
    for level in LEVELS:
        with tempfile.TemporaryDirectory() as folder:
            records = train(level, model=model, steps=steps_each, output_dir=Path(folder) / "run")
        evals = [record[EVAL] for record in records if EVAL in record]
        steps = [record for record in records if "time/step" in record]
        wall_s = sum(record["time/step"] for record in steps)
        staleness = max(record["off_policy/all/max"] for record in steps)
        gap = sum(record["mismatch_abs/all/mean"] for record in steps) / len(steps)
        print(
            f"| {level} | {evals[0]:.3f} | {evals[-1]:.3f} | {wall_s:.1f} | {wall_s / len(steps):.2f} "
            f"| {staleness:.0f} | {gap:.1e} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare levels of asynchrony on reverse_text.")
    parser.add_argument("--model", type=Path, help="where the runs start, such as outputs/demo/sft/weights/final")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(arguments.model or warm_up(Path(folder)), arguments.steps)


if __name__ == "__main__":
    main()
