"""The monitor of a run, and its sinks: W&B, TensorBoard, Trackio and webhooks."""

from __future__ import annotations

import http.client
import json
import os
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from meshrl.core.config import ConfigError
from meshrl.core.config.shared import LogConfig, WandbConfig
from meshrl.core.paths import Layout
from meshrl.core.telemetry.monitor import ConsoleSink, JsonlSink, Monitor, SampleRow, Sink, SinkError
from meshrl.diagnosis.causes import Ailment

WANDB_FINISH_S = 60.0
"""At the end of a run, unless WANDB_FINISH_TIMEOUT is set."""

WEBHOOK_S = 10.0


class WandbSink(Sink):
    """A service that fails is warned about and left out."""

    def __init__(self, config: WandbConfig, folder: Path, settings: Mapping[str, object]) -> None:
        """WANDB_MODE of the environment comes before `offline`."""
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(WANDB_FINISH_S))
        os.environ.setdefault("WANDB_FINISH_TIMEOUT_RAISES", "true")
        self._wandb: Any = None
        self._run: Any = None
        try:
            import wandb  # heavy, and only needed when it is switched on

            folder.mkdir(parents=True, exist_ok=True)
            self._wandb = wandb
            mode: Any = os.environ.get("WANDB_MODE") or ("offline" if config.offline else "online")
            self._run = wandb.init(
                project=config.project,
                name=config.name,
                group=config.group,
                tags=config.tags,
                dir=str(folder),
                mode=mode,
                config=dict(settings),
            )
            self._run.define_metric("*", step_metric="step")  # its own counts calls, from 0 in a resumed run as well
        except Exception as error:  # noqa: BLE001  # wandb raises what it likes, and metrics are not worth a run
            logger.warning(
                "no metrics go to W&B: {}; run `wandb login` or set WANDB_API_KEY, or set wandb.offline or WANDB_MODE ="
                " offline and `wandb sync` later",
                error,
            )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._guarded(lambda: self._run.log({**metrics, "step": step}))

    def write_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        def log_table() -> None:
            table = self._wandb.Table(
                columns=["step", "environment", "task", "prompt", "completion", "reward", "advantage"]
            )
            for row in rows:
                table.add_data(
                    step, row.environment, row.task_key, row.prompt, row.completion, row.reward, row.advantage
                )
            self._run.log({"samples": table, "step": step})

        self._guarded(log_table)

    def write_distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        self._guarded(
            lambda: self._run.log(
                {name: self._wandb.Histogram(list(numbers)) for name, numbers in values.items()} | {"step": step}
            )
        )

    def write_alerts(self, step: int, alerts: Sequence[Ailment]) -> None:
        def alert() -> None:
            for one in alerts:
                self._run.alert(title=one.cause, text=f"step {step}: {one.evidence}; {one.what_to_do}", level="WARN")

        self._guarded(alert)

    def close(self) -> None:
        def finish() -> None:
            kept = Path(self._run.dir).parent
            try:
                self._run.finish()
            except TimeoutError as error:
                raise SinkError(f"it does not take what is left; `wandb sync {kept}` sends it") from error

        self._guarded(finish)

    def _guarded(self, call: Callable[[], None]) -> None:
        if self._run is None:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001  # wandb raises what it likes: go on without it
            logger.warning(f"W&B failed and is off from here on: {error}")
            self._run = None


class WebhookSink(Sink):
    """Posts each new alert as JSON: `text` for chats, and its parts for programs."""

    def __init__(self, url: str, output_dir: Path) -> None:
        self._url = url
        self._run = str(output_dir)

    def write_alerts(self, step: int, alerts: Sequence[Ailment]) -> None:
        """Raises SinkError if it is not taken."""
        for one in alerts:
            text = f"{self._run}, step {step}: {one.cause}: {one.evidence}; {one.what_to_do}"
            body = json.dumps({"text": text, "run": self._run, "step": step, **asdict(one)}).encode()
            asked = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(asked, timeout=WEBHOOK_S):
                    pass
            except (OSError, http.client.HTTPException) as error:
                raise SinkError(
                    f"the webhook does not take the alert {one.cause}: {error}; correct the URL in the variable that"
                    " orchestrator.alerts.webhook_var names"
                ) from error


class TensorBoardSink(Sink):
    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where tensorboardX is not installed."""
        try:
            from tensorboardX import SummaryWriter  # an extra
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"log.tensorboard needs {error.name}: pip install 'meshrl[tensorboard]', or leave it out"
            ) from error
        self._writer = SummaryWriter(str(folder), flush_secs=5)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def write_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        for number, row in enumerate(rows):
            scores = {"reward": row.reward, "advantage": row.advantage}
            scored = (f"{name} {value:.3f}" for name, value in scores.items() if value is not None)
            about = ", ".join((row.environment, *scored))
            self._writer.add_text(f"samples/{number}", f"{about}\n\n    {row.prompt}\n\n    {row.completion}", step)

    def write_distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        for name, numbers in values.items():
            if len(numbers):
                self._writer.add_histogram(name, np.asarray(numbers, np.float64), step)

    def close(self) -> None:
        self._writer.close()


class TrackioSink(Sink):
    """A run in a local Trackio database, which a restart in its folder continues."""

    def __init__(self, output_dir: Path, settings: Mapping[str, object]) -> None:
        """Raises ConfigError where trackio is not installed."""
        os.environ.setdefault("TRACKIO_DIR", str((output_dir / "trackio").resolve()))  # read when it is imported
        try:
            import trackio  # an extra
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"log.trackio needs {error.name}: pip install 'meshrl[trackio]', or leave it out"
            ) from error
        self._trackio = trackio
        with redirect_stdout(StringIO()):  # it prints how to look; --help and the docs say it
            self._run = trackio.init(
                project="meshrl",
                name=output_dir.resolve().name,
                config=dict(settings),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        data = [[row.environment, row.task_key, row.prompt, row.completion, row.reward, row.advantage] for row in rows]
        columns = ["environment", "task", "prompt", "completion", "reward", "advantage"]
        self._run.log({"samples": self._trackio.Table(columns=columns, data=data)}, step=step)

    def write_distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        filled = {name: list(numbers) for name, numbers in values.items() if len(numbers)}
        self._run.log({f"{name}/histogram": self._trackio.Histogram(each) for name, each in filled.items()}, step=step)

    def close(self) -> None:
        with redirect_stdout(StringIO()):
            self._run.finish()


def open_monitor(
    layout: Layout, log: LogConfig, wandb: WandbConfig | None, settings: Mapping[str, object], more: Sequence[Sink] = ()
) -> Monitor:
    """Console and JSONL always, the others when configured, and `more`. Raises ConfigError if a package is missing."""
    sinks: list[Sink] = [ConsoleSink(), JsonlSink(layout.metrics_jsonl), *more]
    if log.tensorboard:
        sinks.append(TensorBoardSink(layout.output_dir / "tensorboard"))
    if log.trackio:
        try:
            sinks.append(TrackioSink(layout.output_dir, settings))
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  # its database or its settings: metrics are not worth a run
            logger.warning("no metrics go to Trackio: {}; mend that, or leave out log.trackio", error)
    if wandb is not None:
        sinks.append(WandbSink(wandb, layout.output_dir, settings))
    return Monitor(sinks)
