"""Trainer throughput on GPUs for Qwen3 shapes with random weights: full training and LoRA, long rows. Prints a table.

    python tests/benchmarks/bench_trainer.py [--only NAME ...] [--gpus N] [--json-dir DIR] [-- trainer flags]

Each row is one `trainer --bench` in a process of its own; what follows `--` goes to every one of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

SHAPES = Path(__file__).parent / "shapes"
LORA = ("--model.lora.rank", "16", "--model.lora.alpha", "32")


def row(shape: str, seq_len: int, *flags: str, keep: str | None = None) -> list[str]:
    """Flags: compiled blocks, steps of 64k tokens, and what activations to `keep` (ac.mode; None keeps them all)."""
    checkpointing = ["--bench.rows", str(65536 // seq_len), *([] if keep is None else ["--model.ac.mode", keep])]
    model = ["--model.name", str(SHAPES / shape), "--seq-len", str(seq_len), "--model.compile"]
    return [*model, *checkpointing, *flags]


ROWS: dict[str, list[str]] = {
    "0.6b-full-640": row("qwen3-0.6b", 640),
    "0.6b-full-16k": row("qwen3-0.6b", 16384),
    "0.6b-full-64k": row("qwen3-0.6b", 65536, keep="selective"),
    "0.6b-lora-16k": row("qwen3-0.6b", 16384, *LORA),
    "0.6b-lora-64k": row("qwen3-0.6b", 65536, *LORA, keep="selective"),
    "4b-full-16k": row("qwen3-4b", 16384, keep="selective"),
    "4b-full-16k-all": row("qwen3-4b", 16384),
    "4b-full-64k": row("qwen3-4b", 65536, keep="attention"),
    "4b-lora-16k": row("qwen3-4b", 16384, *LORA),
    "4b-lora-64k": row("qwen3-4b", 65536, *LORA, keep="attention"),
}


def measure(name: str, flags: list[str], folder: Path, gpus: int, deadline_s: float) -> dict[str, Any]:
    """Runs one row; what it measured, or the end of its log under "error"."""
    path = folder / f"{name}.json"
    command = [sys.executable, "-m", "meshrl.trainer.main", "--bench.random-weights", "--bench.json-path", str(path)]
    command += ["--output-dir", str(folder / name), "--deployment.num-train-gpus", str(gpus), *flags]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {deadline_s:g} s"}
    if done.returncode:
        return {"error": (done.stdout + done.stderr)[-1500:]}
    return {**json.loads(path.read_text()), "wall_s": time.perf_counter() - began}


def line(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    if "error" in found:
        return f"{name:<16} failed: {found['error']}"
    kernels = "  ".join(f"{kernel} {seconds * 1e3:.0f}" for kernel, seconds in found["kernel_s"].items())
    numbers = (
        f"{found['tokens_per_s_per_gpu']:>10,.0f}{found['mfu']:>8.1%}{found['mfu_6n']:>8.1%}{found['peak_memory_gib']:>9.1f}"
        f"{found['step_s']:>8.3f}{found['optimizer_s']:>8.3f}{found['wall_s']:>7.0f}"
    )
    return f"{name:<16}{numbers}   {kernels}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--json-dir", type=Path, default=Path("outputs/bench_trainer"))
    parser.add_argument("--deadline-s", type=float, default=300.0)
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("these shapes need a GPU; on a CPU measure a small model with `trainer --bench`")
    arguments.json_dir.mkdir(parents=True, exist_ok=True)
    header = "{:<16}{:>10}{:>8}{:>8}{:>9}{:>8}{:>8}{:>7}   {}"
    print(
        header.format("row", "tok/s/GPU", "MFU", "MFU 6N", "GiB", "step s", "opt s", "wall s", "kernels of a step, ms")
    )
    for name in arguments.only:
        flags = [*ROWS[name], *arguments.flags]
        print(line(name, measure(name, flags, arguments.json_dir, arguments.gpus, arguments.deadline_s)), flush=True)


if __name__ == "__main__":
    main()
