"""The summary of a run with `--bench`: means over all steps but the first, which warms up, as a table and as JSON.

    trained tokens/s   of all steps over their wall time; while it trains: without waits for batches
    idle               trainer: its wait for batches; engines: the time in which no rollout was out
    efficiency         steps/s achieved over the lower of what engines alone and trainer alone would make
    by turns           the time that both sides alone would take, one after the other, over the time that they took;
                       the measure where both share their GPUs, above 1 where doing both at once pays

A side alone makes its own rate over its tokens of a step; a prompt that a row holds once for several samples counts
once. The rates come from `bench/trainer.json` and `bench/inference.json` in the output folder, which `trainer --bench`
and `inference --bench` write; the latter's counts once for each engine. Without them the trainer's is its rate while it
trained in this run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from meshrl.wire.text_table import plain_table

ROWS: tuple[tuple[str, str], ...] = (
    ("time/step", "seconds a step"),
    ("time/wait_for_rollouts", "  waiting for its rollouts"),
    ("time/wait_for_ckpt", "  waiting for the trainer"),
    ("time/train_step", "seconds a train step"),
    ("time/wait_for_batch", "  of it waiting for a batch"),
    ("perf/rollouts_per_s", "rollouts a second"),
    ("perf/inference_tokens_per_s", "sampled tokens a second"),
    ("perf/throughput", "trained tokens a second, busy"),
    ("perf/mfu", "MFU of the trainer, busy"),
    ("perf/peak_memory", "peak memory of the trainer, GiB"),
    ("weights/pause_s", "seconds of pause a version"),
    ("weights/lag_s", "seconds of lag a version"),
)


@dataclass(frozen=True, kw_only=True)
class AloneRates:
    """Tokens/s of each side alone; None if not measured."""

    engines: float | None = None  # sampled
    trainer: float | None = None  # trained

    @classmethod
    def read(cls, folder: Path) -> AloneRates:
        """A missing or damaged file adds nothing."""
        return cls(engines=_rate(folder / "inference.json"), trainer=_rate(folder / "trainer.json"))


def _rate(path: Path) -> float | None:
    try:
        value = json.loads(path.read_text())["tokens_per_s"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(value) if isinstance(value, int | float) and value > 0 else None


@dataclass(frozen=True, kw_only=True)
class BenchSummary:
    """Shares are of the wall time. Values without a record are None."""

    steps: int
    step_s: float
    sampled_tokens_per_s: float | None
    trained_tokens_per_s: float | None
    trained_tokens_per_s_busy: float | None
    mfu: float | None  # over the wall time
    mfu_busy: float | None
    peak_memory_gib: float | None
    trainer_idle: float | None
    engines_idle: float | None
    engines_alone_tokens_per_s: float | None
    trainer_alone_tokens_per_s: float | None
    trainer_alone_measured: bool  # by `trainer --bench`; else its rate while it trained here
    efficiency: float | None
    by_turns: float | None

    def table(self) -> str:
        said = "" if self.trainer_alone_measured else " (its rate here while busy; `trainer --bench` measures it)"
        rows = [
            ("sampled", _number(self.sampled_tokens_per_s), "tokens/s"),
            ("trained", _number(self.trained_tokens_per_s), "tokens/s",
             _number(self.trained_tokens_per_s_busy), "while it trains"),
            ("MFU", _share(self.mfu), "", _share(self.mfu_busy), "while it trains"),
            ("peak memory", _number(self.peak_memory_gib, 2), "GiB in the trainer"),
            ("idle", _share(self.trainer_idle), "trainer", _share(self.engines_idle), "engines"),
            ("alone", _number(self.engines_alone_tokens_per_s), "tokens/s engines",
             _number(self.trainer_alone_tokens_per_s), f"trainer{said}"),
            ("efficiency", _share(self.efficiency), "of the slower side alone",
             _share(self.by_turns), "of both by turns, as on a GPU that they share"),
        ]  # fmt: skip
        if self.efficiency is None:
            rows[-1] = ("efficiency", "not known", "run `inference --bench` with this output_dir first")
        return plain_table(rows, right={1, 3})

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def summarise(records: Sequence[Mapping[str, float]], alone: AloneRates) -> BenchSummary | None:
    """Over the steps after the first; None without one."""
    measured = [metrics for metrics in records[1:] if metrics.get("time/step", 0.0) > 0.0]
    if not measured:
        return None

    def each(name: str, unknown: float = np.nan) -> NDArray[np.float64]:
        return np.array([metrics.get(name, unknown) for metrics in measured], dtype=np.float64)

    step_s, wait_s = each("time/step"), each("time/wait_for_batch")
    busy_s = each("time/train_step") - wait_s
    trained = each("perf/throughput") * busy_s
    computed = trained * (1.0 - each("batch/shared_prefix_ratio", 0.0))
    sampled = each("perf/inference_tokens_per_s") * step_s
    work = each("perf/mfu") * busy_s
    wall_s = step_s.sum()
    engines = np.fmax.reduce(each("weights/engines", 1.0))
    engines_alone = np.nan if alone.engines is None else alone.engines * max(1.0, engines)
    with np.errstate(divide="ignore", invalid="ignore"):
        busy_rate = trained.sum() / busy_s.sum()
        trainer_alone = busy_rate if alone.trainer is None else alone.trainer
        sampling_s = sampled.sum() / engines_alone  # what each side would take alone for these steps
        training_s = busy_s.sum() if alone.trainer is None else computed.sum() / alone.trainer
        return BenchSummary(
            steps=len(measured),
            step_s=float(wall_s) / len(measured),
            sampled_tokens_per_s=_known(sampled.sum() / wall_s),
            trained_tokens_per_s=_known(trained.sum() / wall_s),
            trained_tokens_per_s_busy=_known(busy_rate),
            mfu=_known(work.sum() / wall_s),
            mfu_busy=_known(work.sum() / busy_s.sum()),
            peak_memory_gib=_known(np.fmax.reduce(each("perf/peak_memory"))),
            trainer_idle=_known(wait_s.sum() / each("time/train_step").sum()),
            engines_idle=_known((each("perf/engines_idle") * step_s).sum() / wall_s),
            engines_alone_tokens_per_s=_known(engines_alone),
            trainer_alone_tokens_per_s=_known(trainer_alone),
            trainer_alone_measured=alone.trainer is not None,
            efficiency=_known(np.maximum(sampling_s, training_s) / wall_s),
            by_turns=_known((sampling_s + training_s) / wall_s),
        )


def summary_table(records: Sequence[Mapping[str, float]]) -> str:
    measured = records[1:]
    if not measured:
        return f"{len(records)} steps are too few to measure: run at least 2"
    rows: list[tuple[str, ...]] = [(f"over {len(measured)} steps", "mean", "min", "max")]
    for name, label in ROWS:
        values = [metrics[name] for metrics in measured if name in metrics]
        if values:
            shown = (sum(values) / len(values), min(values), max(values))
            rows.append((label, *(f"{value:.4f}" for value in shown)))
    return plain_table(rows, right={1, 2, 3})


def report_bench(folder: Path, records: Sequence[Mapping[str, float]]) -> None:
    summary = summarise(records, AloneRates.read(folder))
    text = summary_table(records)
    if summary is not None:
        summary.write(folder / "run.json")
        told = "" if summary.trained_tokens_per_s is None else f"{summary.table()}\n"  # a stand-in tells nothing
        text += f"\n\n{told}numbers in {folder / 'run.json'}"
    logger.info("bench:\n" + text)


def _known(value: np.floating | float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _number(value: float | None, digits: int = 0) -> str:
    return "?" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.1%}"
