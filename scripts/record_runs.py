"""Makes the runs that `meshrl doctor` is tested with: real ones, ill on purpose or well, and records what they wrote.

    python scripts/record_runs.py MODEL FOLDER [NAME ...]

MODEL is a warmed-up model of the reverse-text example, such as `outputs/demo/sft/weights/final`. Each run is made in
FOLDER/NAME, and what the causes read of it is kept in tests/golden/runs/NAME.jsonl.zst. A run that FOLDER holds is not
made again: `make demo` has well_demo, with ENGINE=vllm well_demo_vllm.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import zstandard

ROOT = Path(__file__).parents[1]
TASKSETS = ROOT / "tests/benchmarks/tasksets"
KEPT = ROOT / "tests/golden/runs"
PREFIXES = (
    "reward_parts/",
    "eval/",
    "masked_advantage",
    "loss/",
    "optim/",
    "dropped/",
    "weights/",
    "batch/rollouts",
    "filters/",
)
NAMES = (
    "step", "time/step", "time/train_step", "time/wait_for_batch", "time/wait_for_ckpt", "time/save_ckpt",
    "perf/engines_idle", "perf/idle_slots",
)  # fmt: skip
RUN_DEADLINE_S = 600.0
SMALL = (
    "--max-steps", "40", "--orchestrator.batch-size", "32", "--orchestrator.eval.num-examples", "32",
    "--rollout.workers", "0",
)  # fmt: skip


def ailing(ailment: str, *, held_out: bool = True) -> tuple[str, ...]:
    """Flags of a run of the taskset `ailing_words`."""
    flags = (
        "--orchestrator.train.env.0.id",
        "ailing_words",
        "--orchestrator.train.env.0.args",
        f'{{"ailment": "{ailment}"}}',
    )
    if not held_out:
        return (*flags, "--no-orchestrator.eval")
    args = f'{{"ailment": "{ailment}", "split": "held_out"}}'
    return (*flags, "--orchestrator.eval.env.0.id", "ailing_words", "--orchestrator.eval.env.0.args", args)


RUNS: dict[str, Sequence[str]] = {
    "well_demo": (),
    "well_demo_vllm": (),
    "zero_learning_rate": ("--trainer.optim.lr", "0"),
    "constant_reward": (*ailing("constant"), "--no-orchestrator.filters.zero-signal"),
    "constant_reward_filtered": (*ailing("constant"), "--orchestrator.filters.max-zero-signal-groups", "40"),
    "truncation": ("--orchestrator.sampling.max-tokens", "6"),
    "high_learning_rate": ("--trainer.optim.lr", "0.02"),
    "empty_slots": (*ailing("slow"), "--max-steps", "20", "--orchestrator.max-inflight-rollouts", "32"),
    "errored_rollouts": (*ailing("failing"), "--max-steps", "20"),
    "length_drift": (
        *ailing("length", held_out=False), "--orchestrator.sampling.max-tokens", "90", "--trainer.optim.lr", "1e-3",
    ),
    "repeated_completions": (*ailing("letter", held_out=False), "--trainer.optim.lr", "2e-3"),
    "reward_hacking": (
        *ailing("hacked"), "--orchestrator.sampling.max-tokens", "90", "--orchestrator.eval.sampling.max-tokens", "90",
        "--trainer.optim.lr", "1e-3",
    ),
    "stale_rollouts": ("--orchestrator.max-off-policy-steps", "0", "--max-steps", "20"),
    "masked_tokens": (
        "--trainer.loss.dppo-mask-low", "1e-6", "--trainer.loss.dppo-mask-high", "1e-6", "--max-steps", "20",
    ),
    "idle_engines": (
        "--model.dtype", "bfloat16", "--num-engines", "2", "--orchestrator.batch-size", "128",
        "--trainer.optim.lr", "3e-5", "--weight-broadcast.type", "stream", "--weight-broadcast.anchor-every", "6",
    ),
    "well_reverse_text": (),
    "well_synchronous": ("--max-async-level", "0"),
}  # fmt: skip


def make(model: Path, output_dir: Path, flags: Sequence[str]) -> None:
    """Raises TimeoutExpired; a run that is ill may end with an error."""
    command = [sys.executable, "-m", "meshrl.launch.main", "@", str(ROOT / "configs/reverse_text/rl.toml")]
    command += ["--model.name", str(model), "--output-dir", str(output_dir), *SMALL, *flags]
    code = os.pathsep.join([str(TASKSETS), str(ROOT / "services"), str(ROOT / "clients/python")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": code}, cwd=ROOT, check=False, timeout=RUN_DEADLINE_S
    )
    print(f"{output_dir.name} ended with {done.returncode}", flush=True)


def kept(name: str) -> bool:
    """Whether a metric is among those that the causes read: of all environments together, and of parts and scores."""
    return "/all" in name or name.startswith(PREFIXES) or name in NAMES


def record(output_dir: Path) -> None:
    """Keeps a run's records with six digits."""
    lines = []
    for line in (output_dir / "metrics.jsonl").read_text().splitlines():
        one = {name: value for name, value in json.loads(line).items() if kept(name)}
        lines.append(
            json.dumps(
                {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in one.items()}
            )
        )
    KEPT.mkdir(exist_ok=True)
    with zstandard.open(
        KEPT / f"{output_dir.name}.jsonl.zst", "wt", encoding="utf-8", cctx=zstandard.ZstdCompressor(19)
    ) as file:
        file.write("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(RUNS), choices=[*RUNS, []])
    given = parser.parse_args()
    for name in given.names:
        output_dir = given.folder.resolve() / name
        if not output_dir.exists():
            make(given.model.resolve(), output_dir, RUNS[name])
        record(output_dir)


if __name__ == "__main__":
    main()
