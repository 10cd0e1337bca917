"""Measures a learner on fake data: throughput, utilisation, memory, and where time goes.

tokens/s    tokens of all rows over the time of a step, which ends when its numbers are on the CPU
MFU         the step's `step_flops` over time, ranks and a device's peak
MFU 6N      the same with 6 operations a parameter even where it is frozen, as public LoRA tables count
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from loguru import logger
from torch.profiler import ProfilerActivity, profile

from meshrl.algorithms.objective import Objective
from meshrl.core.config import ConfigError
from meshrl.models.experts import active_parameters
from meshrl.models.load import ModelError, model_shape
from meshrl.training.bench.config import BenchConfig
from meshrl.training.bench.fake_data import fake_batch
from meshrl.training.bench.throughput import peak_flops, peak_memory_gib, step_flops
from meshrl.training.config import SchedulerConfig, TrainingConfig
from meshrl.training.learner import Learner
from meshrl.training.model_config import TrainerModelConfig
from meshrl.training.run_state import RunState
from meshrl.training.start import join_group, load_run
from meshrl.wire.text_table import plain_table
from meshrl.wire.types import MicroBatch

# Kernels are sorted by the first of these that its name contains.
KERNEL_CLASSES: Mapping[str, Sequence[str]] = {
    "attention": ("flash", "fmha", "cudnn_generated", "sdpa", "mha"),
    "collectives": ("nccl",),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
    "optimizer": ("multi_tensor", "adam", "foreach"),
    "copies": ("memcpy", "memset", "copy", "cat", "split"),
}


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Times and rates are medians over the measured steps, so that compiling a block does not count."""

    model: str
    device: str
    ranks: int
    layout: str
    """How the ranks divide the work, as ParallelPlan.layout."""
    seq_len: int
    lengths: str
    tokens_per_step: int
    step_s: float
    forward_backward_s: float
    optimizer_s: float
    other_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    mfu_6n: float
    peak_memory_gib: float
    parameters: int
    trainable_parameters: int
    loss: float
    max_vio: float | None = None
    """Of the last step of a mixture of experts, as RoutingWatch measures it."""
    balanced_routing: bool = False
    kernel_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the traced step by class of kernel, and "idle"."""

    def table(self) -> str:
        parts = f"forward and backward {self.forward_backward_s:.3f}, optimizer {self.optimizer_s:.3f}"
        rows = [
            ("throughput", f"{self.tokens_per_s:,.0f}", f"tokens/s, {self.tokens_per_s_per_gpu:,.0f} a device"),
            ("MFU", f"{self.mfu:.1%}", f"{self.mfu_6n:.1%} at 6 operations a parameter"),
            ("peak memory", f"{self.peak_memory_gib:.1f}", "GiB"),
            ("step", f"{self.step_s:.3f}", f"s, {parts}, other {self.other_s:.3f}"),
            ("parameters", f"{self.parameters:,d}", f"{self.trainable_parameters:,d} trained"),
        ]
        if self.max_vio is not None:
            how = "routers balanced by bench.balanced_routing" if self.balanced_routing else "as the routers choose"
            rows.append(("max_vio", f"{self.max_vio:.2f}", how))
        rows += [(f"  {name}", f"{seconds * 1e3:.1f}", "ms") for name, seconds in self.kernel_s.items()]
        ranks = f"{self.ranks} x {self.device}" + (f" ({self.layout})" if self.ranks > 1 else "")
        title = f"{self.model} on {ranks}, rows of {self.seq_len} tokens, {self.lengths} lengths"
        return f"{title}\n{plain_table(rows, right={1}, indent='  ')}"

    def write(self, path: Path, settings: Mapping[str, object]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**asdict(self), "settings": dict(settings)}, indent=2) + "\n")


def bench_program(
    config: TrainingConfig, bench: BenchConfig, *, objective: Callable[[], Objective], seq_len: int
) -> None:
    """`trainer --bench` and `sft --bench`. Exits with 2 if a changed configuration would help."""
    try:
        bench_rank(config, bench, objective=objective(), seq_len=seq_len, environment=os.environ)
    except (ModelError, ConfigError, ValueError) as error:  # what a changed configuration mends
        logger.error("{}", error)
        sys.exit(2)


def bench_rank(
    config: TrainingConfig,
    bench: BenchConfig,
    *,
    objective: Objective,
    seq_len: int,
    environment: Mapping[str, str],
) -> BenchReport:
    """Measures, and on rank 0 writes and logs the report.

    Raises ModelError, and ValueError for settings that do not fit.
    """
    row_tokens, layers = seq_len * bench.micro_batch_size, bench.num_layers
    with cut_shape(config.model, layers) as given:
        cut = config.model_copy(update={"model": given, "scheduler": SchedulerConfig()})
        parallel = join_group(cut, environment, row_tokens=row_tokens)
        learner, run, model = load_run(
            cut,
            parallel,
            objective,
            row_tokens=row_tokens,
            random_weights=bench.random_weights or layers is not None,
        )
    name = config.model.name + ("" if layers is None else f" ({layers} layers)")
    report = run_bench(learner, run, bench, name=name, seq_len=seq_len)
    if parallel.plan.leads:
        path = bench.json_path or config.output_dir / "bench" / "trainer.json"
        settings = {"bench": bench, "model": model, "optim": config.optim}
        report.write(path, {name: part.model_dump(mode="json") for name, part in settings.items()})
        logger.info("{}\nnumbers in {}", report.table(), path)
    parallel.close()
    return report


def run_bench(learner: Learner, run: RunState, config: BenchConfig, *, name: str, seq_len: int) -> BenchReport:
    """Takes warm-up and measured steps on fake data; collective. The weights change."""
    vocab_size = int(learner.model.config.get_text_config().vocab_size)
    parallel = learner.parallel
    routed = learner.policy.routers.shape if config.balanced_routing else None
    if config.balanced_routing and routed is None:
        raise ValueError("bench.balanced_routing is set, but this model has no experts; leave it out")
    if config.median_length is not None and config.lengths == "fixed":
        raise ValueError("bench.median_length is set, but lengths are fixed; set bench.lengths to variable")
    batches = [
        fake_batch(
            config, seq_len=seq_len, vocab_size=vocab_size, dp_size=parallel.plan.dp_size, seed=seed, balanced=routed
        )
        for seed in range(config.warmup_steps + config.steps)
    ]
    seconds, results = [], []
    for index, batch in enumerate(batches):
        if index == config.warmup_steps and learner.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(learner.device)
        parallel.barrier()
        started = time.perf_counter()
        results.append(learner.step(run, batch))
        _wait(learner.device)
        seconds.append(time.perf_counter() - started)
    measured, times = results[config.warmup_steps :], seconds[config.warmup_steps :]
    step_s = statistics.median(times)
    tokens = [sum(len(row.token_ids) for row in batch) for batch in batches[config.warmup_steps :]]
    flops = [step_flops(learner.model, batch) for batch in batches[config.warmup_steps :]]
    frozen = active_parameters(learner.model) - active_parameters(learner.model, trainable_only=True)
    peak = peak_flops(learner.device) * parallel.plan.world_size
    rate = statistics.median(count / each for count, each in zip(tokens, times, strict=True))
    flops_rate = statistics.median(count / each for count, each in zip(flops, times, strict=True))
    return BenchReport(
        model=name,
        device=torch.cuda.get_device_name(learner.device) if learner.device.type == "cuda" else "CPU",
        ranks=parallel.plan.world_size,
        layout=parallel.plan.layout,
        seq_len=seq_len,
        lengths=config.lengths,
        tokens_per_step=round(statistics.mean(tokens)),
        step_s=step_s,
        forward_backward_s=statistics.median(result.forward_backward_s for result in measured),
        optimizer_s=statistics.median(result.optimizer_s for result in measured),
        other_s=step_s - statistics.median(result.forward_backward_s + result.optimizer_s for result in measured),
        tokens_per_s=rate,
        tokens_per_s_per_gpu=rate / parallel.plan.world_size,
        mfu=flops_rate / peak,
        mfu_6n=(flops_rate + 2.0 * frozen * rate) / peak,
        peak_memory_gib=peak_memory_gib(learner.device),
        parameters=sum(parameter.numel() for parameter in learner.model.parameters()),
        trainable_parameters=sum(p.numel() for p in learner.model.parameters() if p.requires_grad),
        loss=measured[-1].loss,
        max_vio=measured[-1].routing.get("max_vio/mean"),
        balanced_routing=config.balanced_routing,
        kernel_s=_kernel_seconds(learner, run, batches[-1]) if config.profile and learner.device.type == "cuda" else {},
    )


@contextmanager
def cut_shape(model: TrainerModelConfig, layers: int | None) -> Iterator[TrainerModelConfig]:
    """The model, or the shape of its first layers in a temporary folder, with lists such as layer_types cut as well.

    Raises ModelError, ValueError.
    """
    if layers is None:
        yield model
        return
    shape = model_shape(model)
    text = shape.get_text_config()
    whole = int(text.num_hidden_layers)
    if layers > whole:
        raise ValueError(f"bench.num_layers is {layers}, but model.name {model.name!r} has {whole}; set it to that")
    for key, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == whole:
            setattr(text, key, value[:layers])
    text.num_hidden_layers = layers
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        yield model.model_copy(update={"name": folder})


def _kernel_seconds(learner: Learner, run: RunState, batch: Sequence[MicroBatch]) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        started = time.perf_counter()
        learner.step(run, batch)
        _wait(learner.device)
        wall_s = time.perf_counter() - started
    classes: dict[str, float] = {}
    for event in trace.key_averages():
        lowered = event.key.lower()
        of = next((name for name, parts in KERNEL_CLASSES.items() if any(part in lowered for part in parts)), "other")
        classes[of] = classes.get(of, 0.0) + event.self_device_time_total * 1e-6
    ranked = dict(sorted(classes.items(), key=lambda item: -item[1]))
    busy = sum(seconds for name, seconds in ranked.items() if name != "collectives")  # those run beside the others
    return ranked | {"idle": max(0.0, wall_s - busy)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
