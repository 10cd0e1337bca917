"""The same run again and again: are rewards, tokens and losses of every step the same, to the last digit?

    python tests/benchmarks/bench_golden_run.py --runs 2
    python tests/benchmarks/bench_golden_run.py --model outputs/demo/sft/weights/final --beside ../before

Synchronous steps from one warm-up (made here unless --model names one), one request at a time so that no sum depends on
what runs beside it. --beside names another checkout, whose run is compared with ours.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUN_DEADLINE_S = 1200.0
TIMES = ("time/", "perf/", "weights/", "loop_lag", "memory", "disk/", "timestamp")
"""Beginnings of what a clock or the machine says, which no two runs have in common."""


def warmed_up(folder: Path, steps: int) -> Path:
    model, data, out = folder / "model", folder / "data", folder / "sft"
    for module, target in (("model", model), ("demonstrations", data)):
        program(f"meshrl.environments.reverse_text.{module}", str(target))
    flags = {
        "model.name": model, "data.name": data / "train.jsonl", "val.data.name": data / "val.jsonl", "output-dir": out,
        "max-steps": steps,
    }  # fmt: skip
    program("meshrl.sft.main", "@", str(ROOT / "configs/reverse_text/sft.toml"), *as_flags(flags))
    return out / "weights" / "final"


def run(out: Path, model: Path, steps: int, checkout: Path) -> list[dict[str, Any]]:
    """The records of a run's steps; those of its rollouts are in its ledger."""
    flags = {
        "model.name": model, "seed": 0, "max-async-level": 0, "max-steps": steps, "orchestrator.batch-size": 16,
        "orchestrator.group-size": 8, "orchestrator.eval.interval": 1000, "rollout.max-concurrent": 1,
        "inference.max-num-seqs": 1, "inference.engine": "embedded", "output-dir": out,
    }  # fmt: skip
    command = ("@", str(checkout / "configs/reverse_text/rl.toml"), "--no-orchestrator.eval.eval-base")
    program("meshrl.launch.main", *command, *as_flags(flags), checkout=checkout)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "reward/all/mean" in record]


def program(module: str, *words: str, checkout: Path = ROOT) -> None:
    python = checkout / ".venv" / "bin" / "python"
    command = [str(python if python.exists() else sys.executable), "-m", module, *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, cwd=checkout, env=environ, capture_output=True, text=True, timeout=RUN_DEADLINE_S, check=False
    )
    if ran.returncode:
        sys.exit((ran.stdout + ran.stderr)[-4000:])


def as_flags(values: dict[str, Any]) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def kept(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without what the clock says."""
    return [{key: value for key, value in record.items() if not key.startswith(TIMES)} for record in records]


def differing(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, int]:
    """Keys that differ, each with the first step in which they do."""
    found: dict[str, int] = {}
    for one, other in zip(kept(first), kept(second), strict=True):
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                found.setdefault(key, int(one["step"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a warm-up; made here where it is left out")
    parser.add_argument("--sft-steps", type=int, default=60, help="steps of the warm-up that is made (default: 60)")
    parser.add_argument("--runs", type=int, default=2, help="runs of this checkout (default: 2)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run (default: 10)")
    parser.add_argument("--beside", type=Path, help="another checkout, with its own .venv")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = given.model or warmed_up(folder, given.sft_steps)
        digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]
        print(f"warm-up {digest}")
        checkouts = [ROOT] * given.runs + ([given.beside.resolve()] if given.beside else [])
        runs = [
            run(folder / f"run_{number}", model.resolve(), given.steps, where) for number, where in enumerate(checkouts)
        ]
        compared = len(kept(runs[0])[0])
        for number, (records, where) in enumerate(zip(runs, checkouts, strict=True)):
            first, last = records[0], records[-1]
            print(
                f"run {number} of {where.name}: loss {first['loss/mean']!r} to {last['loss/mean']!r},"
                f" reward {first['reward/all/mean']!r} to {last['reward/all/mean']!r}"
            )
            if number:
                wrong = differing(runs[0], records)
                print(f"  {compared - len(wrong)} of {compared} keys as in run 0, in all of {len(records)} steps")
                print("".join(f"  {key} from step {step} on\n" for key, step in wrong.items()), end="")


if __name__ == "__main__":
    main()
