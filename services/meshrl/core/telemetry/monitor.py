"""Writes a run's metrics to its sinks: console, a JSONL file and those of `sinks`. A failing sink loses metrics but
never ends the run."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from loguru import logger

from meshrl.core.durable import append_whole
from meshrl.diagnosis.causes import Ailment

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
"""Of a step's console line, as (metric, label, format)."""


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """A sample of fine-tuning has neither reward nor advantage."""

    environment: str
    task_key: str
    prompt: str
    completion: str
    reward: float | None
    advantage: float | None


class SinkError(Exception):
    """The message names the remedy."""


class Sink:
    """Calls come from one thread at a time, may block, and may raise."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        return

    def write_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        return

    def write_distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        return

    def write_alerts(self, step: int, alerts: Sequence[Ailment]) -> None:
        return

    def close(self) -> None:
        return


class Monitor:
    """Safe from several threads; blocking. A failing sink is warned about once, and asked again with every record."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._failing: set[int] = set()  # places in `_sinks`
        self._lock = threading.Lock()
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda sink: sink.write(step, metrics))

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._each(lambda sink: sink.write_samples(step, rows))

    def log_distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        self._each(lambda sink: sink.write_distributions(step, values))

    def log_alerts(self, step: int, alerts: Sequence[Ailment]) -> None:
        self._each(lambda sink: sink.write_alerts(step, alerts))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[Sink], None]) -> None:
        with self._lock:
            for place, sink in enumerate(self._sinks):
                try:
                    call(sink)
                except Exception as error:  # noqa: BLE001  # whatever it is, metrics are not worth a run
                    if place not in self._failing:
                        logger.warning("{}; the run goes on", error)
                    self._failing.add(place)
                else:
                    if place in self._failing:
                        logger.info("{} takes metrics again", type(sink).__name__)
                    self._failing.discard(place)


class ConsoleSink(Sink):
    """One log line a record."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [f"{label} {metrics[name]:{spec}}" for name, label, spec in CONSOLE_FIELDS if name in metrics]
        parts += [f"{name} {value:.4f}" for name, value in metrics.items() if name.startswith("eval/") and "@" in name]
        if parts:
            logger.info("step {} | {}", step, " | ".join(parts))


class JsonlSink(Sink):
    """Numbers that are not finite become null. Lines that a full disk refuses wait in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._waiting: list[bytes] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        record: dict[str, float | None] = {"step": step}
        record |= {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._waiting.append((json.dumps(record) + "\n").encode())
        self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            while self._waiting:
                append_whole(self._file, self._waiting[0])
                del self._waiting[0]
        except OSError as error:
            raise SinkError(
                f"{self._path} cannot be written ({error.strerror}), {len(self._waiting)} records wait; free some space"
                " and they follow"
            ) from error

    def close(self) -> None:
        try:
            self._write_waiting()
        finally:
            if self._file is not None:
                self._file.close()
