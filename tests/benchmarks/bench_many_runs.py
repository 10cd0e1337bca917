"""Many LoRA runs in one trainer, without hub and engines: what they cost beside one run. Prints a table.

    python tests/benchmarks/bench_many_runs.py [--model FOLDER] [--seq-len N] [--short N] [--small N] [--steps N]

Made-up batches go through the trainer's own loop; the model has random weights. A step of a run has a row of the given
length. `one` has as many rows a step as the eight runs have together, `in turn` passes each row by itself, `joined`
those of several runs together, and `one after the other` trains each run to its end before the next begins.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from loguru import logger

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from many_runs import ManyRuns, many_runs
from meshrl.models.load import resolve_device
from meshrl.trainer.build import compile_kernels
from meshrl.trainer.loop import Joining
from meshrl.training.auto_settings import resolve_auto
from meshrl.training.bench.config import BenchConfig
from meshrl.training.bench.fake_data import fake_batch
from meshrl.training.build import build_learner
from meshrl.training.config import OptimConfig
from meshrl.training.learner import Learner
from meshrl.training.model_config import CompileConfig, LoraConfig, TrainerModelConfig
from meshrl.training.parallel.rank_group import RankGroup
from meshrl.wire.text_table import plain_table
from meshrl.wire.types import Batch, StepState

SHAPES = Path(__file__).parent / "shapes"
CASES = ("short", "long", "small")
LORA = LoraConfig(rank=16, alpha=32.0)


def load(model: str, seq_len: int) -> Learner:
    given = TrainerModelConfig(name=model, lora=LORA)
    device = resolve_device(given.device)
    parallel = RankGroup.start(os.environ, device=device)
    config, logits = resolve_auto(given, OptimConfig(), parallel, seq_len=seq_len, max_logits_mib=None, publishes=True)
    learner = build_learner(config, parallel=parallel, max_logits_bytes=logits, random_weights=True)
    if isinstance(config.compile, CompileConfig) and device.type == "cuda":
        compile_kernels(learner, seq_len=seq_len)
    return learner


class Trainer:
    """A trainer of several runs with made-up batches."""

    def __init__(self, mesh: ManyRuns, names: Sequence[str]) -> None:
        self.mesh, self.names = mesh, names
        self.create_s: list[float] = []
        self._step = dict.fromkeys(names, 0)
        self.norms: dict[str, list[float]] = {name: [] for name in names}
        self.last: dict[str, Mapping[str, float]] = {}
        """What the last step of each run took, by stage."""
        self._vocab = int(mesh.learner.model.config.get_text_config().vocab_size)

    async def create(self) -> None:
        for name in self.names:
            began = time.perf_counter()
            await self.mesh.create(name, {"lora": LORA.model_dump()})
            self.create_s.append(time.perf_counter() - began)

    def batch(self, name: str, step: int, tokens: int, rows: int) -> Batch:
        made = fake_batch(
            BenchConfig(rows=rows),
            seq_len=tokens,
            vocab_size=self._vocab,
            dp_size=1,
            seed=step * 100 + self.names.index(name),
        )
        loss_tokens = sum(int(row.loss_mask.sum()) for row in made)
        return Batch(run_id=name, step=step, micro_batches=made, loss_tokens=loss_tokens, environments=("env",))

    async def steps(self, name: str, count: int, tokens: int, rows: int = 1) -> None:
        for _ in range(count):
            self._step[name] += 1
            await self.mesh.submit(name, self._step[name], made=self.batch(name, self._step[name], tokens, rows))
        await self.mesh.until(name, self._step[name])
        done = [e for e in self.mesh.table.find(name).book.events_after(0) if e.state is StepState.DONE]
        self.norms[name] = [event.metrics["optim/grad_norm"] for event in done]
        self.last[name] = done[-1].timings_s

    async def together(self, count: int, tokens: int, rows: int = 1) -> float:
        """Seconds of so many steps of every run at once, from the first batch to the last version."""
        began = time.perf_counter()
        await asyncio.gather(*(self.steps(name, count, tokens, rows) for name in self.names))
        return time.perf_counter() - began

    async def in_a_row(self, count: int, tokens: int) -> float:
        """The same of one run after the other."""
        began = time.perf_counter()
        for name in self.names:
            await self.steps(name, count, tokens)
        return time.perf_counter() - began


async def measure(arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    learner = load(arguments.model, arguments.seq_len)
    room = Joining(below=arguments.seq_len // 4, room=arguments.seq_len)
    table: list[tuple[str, ...]] = []
    norms: dict[str, dict[str, list[float]]] = {}

    async def case(title: str, runs: int, tokens: int, *, rows: int = 1, steps: int, joining: Joining | None,
                   alone: bool = False) -> float:  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            async with many_runs(learner, Path(folder), max_runs=runs, joining=joining) as mesh:
                trainer = Trainer(mesh, [f"run{number}" for number in range(runs)])
                await trainer.create()
                await trainer.together(1 if alone or tokens == arguments.seq_len else 2, tokens)
                began = trainer.in_a_row(steps, tokens) if alone else trainer.together(steps, tokens, rows)
                seconds = await began
                assert mesh.error is None, mesh.error
                norms[title] = trainer.norms
                create_s = statistics.median(trainer.create_s[1:] or trainer.create_s)
        rate = runs * rows * steps * tokens / seconds
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        stages = [
            f"{statistics.median(last[stage] for last in trainer.last.values()):.3f}"
            for stage in ("forward_backward", "optimizer", "gather_weights")
        ]
        table.append((title, f"{rate:,.0f}", f"{seconds / steps:.3f}", *stages, f"{create_s:.3f}", f"{peak:.1f}"))
        print("  ".join(table[-1]), flush=True)
        return rate

    def ratio(title: str, value: float) -> None:
        table.append((title, f"{value:.2f}", *[""] * 6))
        print("  ".join(table[-1][:2]), flush=True)

    long, short, small, steps = arguments.seq_len, arguments.short, arguments.small, arguments.steps
    if "short" in arguments.only:
        joined = await case(f"eight runs, rows of {short}, joined", 8, short, steps=steps, joining=room)
        turn = await case(f"eight runs, rows of {short}, in turn", 8, short, steps=steps, joining=None)
        ratio("  joined to in turn", joined / turn)
        first, second = list(norms.values())[-2:]
        ratio("  most that a norm differs, %", 100 * max(abs(first[n][0] / second[n][0] - 1) for n in first))
    if "long" in arguments.only:
        ones = [await case(f"one run, 8 rows of {long}", 1, long, rows=8, steps=2, joining=None)]
        eight = await case(f"eight runs, a row of {long} each", 8, long, steps=2, joining=None)
        ratio("  eight to one", eight / ones[0])
        ones.append(await case(f"one run, 8 rows of {long}", 1, long, rows=8, steps=2, joining=None))
        ratio("  eight to one before and after", eight / statistics.mean(ones))
    if "small" in arguments.only:
        many = await case(f"32 runs, rows of {small}, joined", 32, small, steps=steps, joining=room)
        row = await case(f"32 runs, rows of {small}, one after the other", 32, small, steps=1, joining=None, alone=True)
        ratio("  joined to one after the other", many / row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHAPES / "qwen3-4b"), help="a folder with a config.json")
    parser.add_argument("--seq-len", type=int, default=16384, help="tokens of a long row")
    parser.add_argument("--short", type=int, default=512, help="tokens of a short row")
    parser.add_argument("--small", type=int, default=128, help="tokens of a step of the 32 runs")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="rows of the table")
    parser.add_argument("--steps", type=int, default=5, help="steps that are measured")
    arguments = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    table = asyncio.run(measure(arguments))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n{arguments.model} on {device}, LoRA of rank {LORA.rank}; tokens/s, seconds a step of all runs;")
    print("of one run: seconds in passes, in the optimizer, to copy the version, in CreateRun; GiB at most")
    print(plain_table(table, right=set(range(1, 8)), indent="  "))


if __name__ == "__main__":
    main()
