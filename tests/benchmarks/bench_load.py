"""A mixture of experts from files: a folder of random weights in a true shape, and a trainer that loads it.

    python tests/benchmarks/bench_load.py make FOLDER [--shape NAME] [--layers N]
    python tests/benchmarks/bench_load.py train FOLDER [--seq-len T] [--rows N] [--lora-rank R]

`make` writes bfloat16 weights under the names of published files, experts one by one, a file a layer. `train` reads
them as `trainer` does, on one GPU or under torchrun, takes steps, and prints the most host memory of rank 0 while it
loaded: its own, and the pages of files, which the system takes back when it needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from meshrl.algorithms.losses import cross_entropy_loss
from meshrl.algorithms.objective import Objective
from meshrl.models import load
from meshrl.models.folder import as_in_files
from meshrl.models.state import stored_tensors
from meshrl.training.auto_settings import resolve_auto
from meshrl.training.bench.config import BenchConfig
from meshrl.training.bench.run import cut_shape, run_bench
from meshrl.training.build import build_learner
from meshrl.training.config import OptimConfig, SchedulerConfig
from meshrl.training.model_config import LoraConfig, TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup

SHAPES = Path(__file__).parent / "shapes"


def make(folder: Path, shape: Path, layers: int | None) -> None:
    """A file for each layer, and one for the rest."""
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    with cut_shape(TrainerModelConfig(name=str(shape)), layers) as cut:
        model = load.empty_model(cut, dtype=torch.bfloat16)
    model.config.save_pretrained(folder)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stored_tensors(model).items():
        found = re.search(r"\.layers\.(\d+)\.", name)
        parts.setdefault(f"layer-{int(found.group(1)):03d}" if found else "rest", {})[name] = tensor
    index: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts.values(), start=1):
        made = {
            name: torch.ones(like.shape, dtype=like.dtype)
            if like.ndim < 2
            else torch.empty(like.shape, dtype=like.dtype, device=device).normal_(std=0.02).cpu()
            for name, like in part.items()
        }
        stored = {name: tensor.clone() for name, tensor in as_in_files(model, made).items()}
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(stored, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(stored, file)
        total += sum(tensor.nbytes for tensor in stored.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    print(f"{folder}: {len(index):,d} tensors, {total / 2**30:.1f} GiB, {time.perf_counter() - began:.0f} s")


class HostPeak:
    """Watches the memory of this process until `stop`: what it had at most, in GiB, of its own and of files' pages."""

    def __init__(self) -> None:
        self.own = self.files = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        self._look()
        while not self._ended.wait(0.02):
            self._look()

    def _look(self) -> None:
        status = Path("/proc/self/status").read_text()
        own, files = (int(kib) / 2**20 for kib in re.findall(r"Rss(?:Anon|File):\s+(\d+)", status))
        self.own, self.files = max(self.own, own), max(self.files, files)

    def stop(self) -> HostPeak:
        self._ended.set()
        self._thread.join()
        return self


def train(folder: Path, *, seq_len: int, rows: int, rank: int, steps: int) -> None:
    """Loads the folder and trains adapters."""
    parallel = RankGroup.start(os.environ, device=load.resolve_device("auto"))
    config = TrainerModelConfig(name=str(folder), dtype="bfloat16", lora=LoraConfig(rank=rank))
    optim = OptimConfig(lr=1e-4)
    config, logits_bytes = resolve_auto(config, optim, parallel, seq_len=seq_len, max_logits_mib=None)
    before, began = HostPeak().stop().own, time.perf_counter()
    peak = HostPeak()
    learner = build_learner(config, parallel=parallel, max_logits_bytes=logits_bytes)
    peak.stop()
    seconds = time.perf_counter() - began
    run = learner.new_run(
        objective=Objective(loss=cross_entropy_loss),
        optim=optim,
        scheduler=SchedulerConfig(),
        max_steps=None,
    )
    report = run_bench(learner, run, BenchConfig(rows=rows, steps=steps), name=folder.name, seq_len=seq_len)
    if parallel.plan.leads:
        files = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**30
        print(
            f"{files:.1f} GiB of files are loaded in {seconds:.1f} s; host memory of a rank: {before:.2f} GiB before, "
            f"{peak.own:.2f} at most, and {peak.files:.2f} of files' pages"
        )
        print(report.table())
    parallel.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making, training = commands.add_parser("make"), commands.add_parser("train")
    for each in (making, training):
        each.add_argument("folder", type=Path)
    making.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(path.name for path in SHAPES.iterdir()))
    making.add_argument("--layers", type=int)
    training.add_argument("--seq-len", type=int, default=16384)
    training.add_argument("--rows", type=int, default=2)
    training.add_argument("--lora-rank", type=int, default=16)
    training.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    if given.command == "make":
        make(given.folder, SHAPES / given.shape, given.layers)
    else:
        train(given.folder, seq_len=given.seq_len, rows=given.rows, rank=given.lora_rank, steps=given.steps)


if __name__ == "__main__":
    main()
