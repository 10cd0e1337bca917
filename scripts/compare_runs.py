"""Makes the same seeded, synchronous run in two checkouts and compares its tokens, rewards and losses bit for bit.

    python scripts/compare_runs.py MODEL OLD_CHECKOUT NEW_CHECKOUT OUTPUT_DIR [--steps N]

MODEL is a warmed-up model of the reverse-text example, such as `outputs/demo/sft/weights/final`. The run is
configs/reverse_text/rl.toml at `max_async_level = 0`, with the embedded engine on the CPU and one request at a time:
a sum over other rows than before rounds differently. A checkout without a `.venv` runs in this one's. A run that
OUTPUT_DIR holds already is not made again. Exits with 1 when the runs differ.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import zstandard

RUN_DEADLINE_S = 840.0
COMPARED = ("loss/", "optim/", "reward/", "entropy/", "mismatch_kl/", "advantage/", "batch/", "completion_len/")
"""Metrics that do not depend on how fast the machine is."""


def run(checkout: Path, model: Path, output_dir: Path, steps: int) -> None:
    """Trains `steps` steps with the code of a checkout. Raises CalledProcessError or TimeoutExpired."""
    python = checkout / ".venv/bin/python"
    code = [str(checkout / "services"), str(checkout / "clients/python")]
    flags = {
        "model.name": model,
        "output-dir": output_dir,
        "max-steps": steps,
        "max-async-level": 0,
        "seed": 1,
        "inference.max-num-seqs": 1,
        "orchestrator.batch-size": 64,
        "orchestrator.max-inflight-rollouts": 8,
        "orchestrator.rollout-samples.random": 1_000,
    }
    interpreter = str(python) if python.exists() else sys.executable
    command = [interpreter, "-m", "meshrl.launch.main", "@", str(checkout / "configs/reverse_text/rl.toml")]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    subprocess.run(
        [*command, "--no-orchestrator.eval"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(code)},
        cwd=checkout,
        check=True,
        timeout=RUN_DEADLINE_S,
    )


def rollouts(output_dir: Path, step: int) -> list[tuple[Any, ...]]:
    """(task, reward, tokens, logprobs) of each rollout of a step, in an order that does not depend on its ids."""
    packed = (output_dir / f"rollouts/step_{step}.jsonl.zst").read_bytes()
    lines = map(json.loads, zstandard.ZstdDecompressor().decompressobj().decompress(packed).splitlines())
    return sorted(
        (
            line["task_key"],
            line["reward"],
            [sample["token_ids"] for sample in line["samples"]],
            [[0.0 if value is None else value for value in sample["logprobs"]] for sample in line["samples"]],
        )
        for line in lines
    )


def metrics(output_dir: Path) -> dict[int, dict[str, float]]:
    """The compared metrics of each step."""
    records = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
    return {
        record["step"]: {name: value for name, value in record.items() if name.startswith(COMPARED)}
        for record in records
        if "loss/mean" in record
    }


def compare(old: Path, new: Path, steps: int) -> bool:
    """Prints a line a step; returns whether all of them are equal."""
    of_old, of_new, same = metrics(old), metrics(new), True
    for step in range(1, steps + 1):
        before, after = rollouts(old, step), rollouts(new, step)
        names = sorted(of_old[step].keys() | of_new[step].keys())
        differing = [name for name in names if of_old[step].get(name) != of_new[step].get(name)]
        parts = {
            what: [one[place] for one in before] == [one[place] for one in after]
            for place, what in enumerate(("tasks", "rewards", "tokens", "logprobs"))
        }
        same &= all(parts.values()) and not differing
        verdicts = [f"{what} {'equal' if equal else 'DIFFER'}" for what, equal in parts.items()]
        verdicts.append(f"{len(names)} metrics {'equal' if not differing else 'DIFFER in ' + ', '.join(differing)}")
        losses = " and ".join(
            repr(value) for value in dict.fromkeys((of_old[step]["loss/mean"], of_new[step]["loss/mean"]))
        )
        print(f"step {step}: {len(before)} rollouts, {', '.join(verdicts)}, loss {losses}")
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "old", "new", "output_dir"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    model, folders = given.model.resolve(), {}
    for which in ("old", "new"):
        folders[which] = (given.output_dir / which).resolve()
        if not (folders[which] / f"rollouts/step_{given.steps}.jsonl.zst").exists():
            run(getattr(given, which).resolve(), model, folders[which], given.steps)
    sys.exit(0 if compare(folders["old"], folders["new"], given.steps) else 1)


if __name__ == "__main__":
    main()
