"""Every `configs/*/gpu.toml` for a few steps on one GPU with random weights: does it run, how fast, in what memory.

    python tests/benchmarks/bench_gpu_configs.py --shape qwen3-0.6b --steps 4 --output-dir OUT
    python tests/benchmarks/bench_gpu_configs.py --tiny letter_sort          # a small model and this CPU

Each is run as its first lines say, but for the model, which is made here, and for what random weights and a tokenizer
of bytes want: rows of equal rewards are trained, and conversations may have --room tokens. The engine and the trainer
share the GPU, so each half waits for the other; with two GPUs they would not. The examples with a teacher are given one
of the same shape, on the same GPU. A row of the table is of the steps after the first two.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "support"))
from bench_run import make_model

from chatml_tokenizer import chatml_tokenizer
from meshrl.environments.reverse_text.model import CHAT_TEMPLATE

CONFIGS = Path(__file__).parents[2] / "configs"
TAUGHT = ("distillation", "two_algorithms")
TEACHER_PORT, UP_S, RUN_S = 8001, 300.0, 420.0
WARM_UP = 2
COLUMNS = ("time/step", "perf/throughput", "perf/peak_memory", "seq_len/all/mean", "reward/all/mean")


def names() -> list[str]:
    return sorted(path.parent.name for path in CONFIGS.glob("*/gpu.toml"))


def model_of(shape: str | None, folder: Path) -> Path:
    """Random weights with the tokens that Qwen3's renderer wants."""
    made = make_model(shape, folder, ragged=False, mean_tokens=1000)
    chatml_tokenizer(CHAT_TEMPLATE).save_pretrained(made)
    return made


@contextmanager
def teacher(model: Path, flags: Sequence[str], folder: Path) -> Iterator[None]:
    """An engine of the same shape at the port that the examples name."""
    command = [sys.executable, "-m", "meshrl.inference.main", "--model.name", str(model), *flags]
    command += ["--server.port", str(TEACHER_PORT), "--output-dir", str(folder)]
    folder.mkdir(parents=True)
    with (folder / "console.txt").open("wb") as console:
        process = subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT)
    try:
        end_s = time.monotonic() + UP_S
        while True:
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"the teacher is not up:\n{(folder / 'console.txt').read_text()[-3000:]}")
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{TEACHER_PORT}/health", timeout=5.0):
                break
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60.0)


def run(name: str, model: Path, flags: Sequence[str], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """One example for some steps; the records of its steps. Ends the benchmark with its log when it fails."""
    folder = asked.output_dir.resolve() / name
    command = [sys.executable, "-m", "meshrl.launch.main", "@", str(CONFIGS / name / "rl.toml")]
    command += ["@", str(CONFIGS / name / "gpu.toml"), "--model.name", str(model), "--max-steps", str(asked.steps)]
    command += ["--orchestrator.filters.zero-signal", "false", "--output-dir", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    if done.returncode:
        print(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2500:]}", flush=True)
        return []
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "time/step" in record]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", help=f"of {', '.join(names())}; all of them")
    parser.add_argument("--shape", default="qwen3-0.6b", help="a folder of tests/benchmarks/shapes")
    parser.add_argument("--tiny", action="store_true", help="a small model, small batches and the embedded engine")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--room", type=int, default=2048, help="tokens of a conversation")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/gpu_configs"))
    asked, others = parser.parse_known_args()
    asked.output_dir.mkdir(parents=True, exist_ok=True)
    model = model_of(None if asked.tiny else asked.shape, asked.output_dir.resolve() / "model")
    room, taught = str(asked.room), ["--max-model-len", str(asked.room)]
    flags = ["--inference.max-model-len", room, "--rollout.seq-len", room, *others]
    if asked.tiny:
        small = ["--orchestrator.batch-size", "16", "--orchestrator.group-size", "8", "--trainer.seq-len", "4096"]
        flags += [
            "--inference.engine",
            "embedded",
            "--model.dtype",
            "float32",
            "--orchestrator.seq-len",
            "4096",
            *small,
        ]
        taught += ["--engine", "embedded", "--model.dtype", "float32"]
    else:
        flags += ["--inference-gpu-ids", "0", "--trainer-gpu-ids", "0"]
        taught += ["--engine", "vllm", "--gpu-memory-utilization", "0.15"]
    print("| example | s a step | tokens/s trained | GiB of the trainer | tokens a rollout | reward | s in all |")
    print("|---" * 7 + "|", flush=True)
    failed = 0
    for name in asked.examples or names():
        began_s = time.monotonic()
        if name in TAUGHT:
            with teacher(model, taught, asked.output_dir.resolve() / f"{name}_teacher"):
                records = run(name, model, flags, asked)
        else:
            records = run(name, model, flags, asked)
        failed += not records
        kept = records[WARM_UP:] or records
        cells = [fmean(found) if (found := [r[key] for r in kept if key in r]) else float("nan") for key in COLUMNS]
        cells.append(time.monotonic() - began_s)
        print(f"| {name} | " + " | ".join(f"{cell:,.4g}" for cell in cells) + " |", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
