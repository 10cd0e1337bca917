"""Where metrics go: console, a JSONL file and Weights & Biases; fed by whoever leads a loop (orchestrator, sft)."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from loguru import logger

CONSOLE_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("reward/all/mean", "reward", ".4f"),
    ("loss/mean", "loss", ".4f"),
    ("val/loss", "val loss", ".4f"),
    ("seq_len/all/mean", "seq_len", ".1f"),
    ("off_policy/all/mean", "staleness", ".2f"),
    ("mismatch_kl/all/mean", "mismatch_kl", ".2e"),
    ("entropy/all/mean", "entropy", ".3f"),
    ("optim/grad_norm", "grad_norm", ".3f"),
    ("optim/lr", "lr", ".2e"),
    ("time/step", "step_s", ".2f"),
    ("time/wait_for_rollouts", "wait_rollouts_s", ".2f"),
    ("time/wait_for_ckpt", "wait_ckpt_s", ".2f"),
    ("perf/rollouts_per_s", "rollouts/s", ".1f"),
    ("weights/pause_s", "pause_s", ".4f"),
    ("weights/lag_s", "lag_s", ".3f"),
)
"""What a step's console line shows, as (metric, label, format); metrics that a record lacks are left out."""


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """One rollout for a table of samples."""

    environment: str
    task_key: str
    completion: str
    reward: float
    advantage: float | None


class Sink(Protocol):
    """One destination. Calls come from one thread at a time and may block."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def write_samples(self, step: int, rows: Sequence[SampleRow]) -> None: ...

    def write_distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None: ...

    def close(self) -> None: ...


class Monitor:
    """Writes one record to every sink. Safe from several threads; blocking, so call it beside an event loop."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._lock = threading.Lock()
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.write(step, metrics)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.write_samples(step, rows)

    def log_distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        with self._lock:
            for sink in self._sinks:
                sink.write_distributions(step, values)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                for sink in self._sinks:
                    sink.close()


class ConsoleSink:
    """One log line a record: the main numbers of a step, or every score of an evaluation."""

    def __init__(self, emit: Callable[[str], None] = logger.info) -> None:
        self._emit = emit

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [f"{label} {metrics[name]:{spec}}" for name, label, spec in CONSOLE_FIELDS if name in metrics]
        parts += [f"{name} {value:.4f}" for name, value in metrics.items() if name.startswith("eval/") and "@" in name]
        if parts:
            self._emit(f"step {step} | " + " | ".join(parts))

    def write_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Tables do not fit a console."""

    def write_distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Nor do histograms."""

    def close(self) -> None:
        """Nothing is held open."""


class JsonlSink:
    """One JSON object a record: `{"step": n, name: value, ...}`; numbers that are not finite become null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        record: dict[str, float | None] = {"step": step}
        record |= {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def write_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Samples go to tables of W&B only; the ledger and the traces name every rollout."""

    def write_distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Histograms go to W&B only; a record has the statistics."""

    def close(self) -> None:
        self._file.close()


class WandbSink:
    """A Weights & Biases run. A failing service costs metrics, never the run: it is logged and the sink ends."""

    def __init__(
        self,
        *,
        project: str,
        name: str | None,
        group: str | None = None,
        tags: Sequence[str] = (),
        offline: bool,
        folder: Path,
        settings: Mapping[str, Any],
    ) -> None:
        import wandb  # heavy, and only needed when it is switched on

        folder.mkdir(parents=True, exist_ok=True)
        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=project,
            name=name,
            group=group,
            tags=list(tags),
            dir=str(folder),
            mode="offline" if offline else "online",
            config=dict(settings),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._guarded(lambda: self._run.log({**metrics, "step": step}))

    def write_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        def log_table() -> None:
            table = self._wandb.Table(columns=["step", "environment", "task", "completion", "reward", "advantage"])
            for row in rows:
                table.add_data(step, row.environment, row.task_key, row.completion, row.reward, row.advantage)
            self._run.log({"samples": table, "step": step})

        self._guarded(log_table)

    def write_distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        self._guarded(
            lambda: self._run.log(
                {name: self._wandb.Histogram(list(numbers)) for name, numbers in values.items()} | {"step": step}
            )
        )

    def close(self) -> None:
        self._guarded(lambda: self._run.finish())

    def _guarded(self, call: Callable[[], None]) -> None:
        if self._run is None:
            return
        try:
            call()
        except (self._wandb.Error, OSError) as error:  # metrics are not worth a run: go on without W&B
            logger.warning(f"W&B failed and is off from here on: {error}")
            self._run = None
