"""The metrics of a run in a Trackio database, where `log.trackio` is set; opened by `monitor`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from meshrl.core.config import ConfigError
from meshrl.core.telemetry.monitor import SampleRow


class TrackioSink:
    """A run in a local Trackio database; one that is started again in its folder goes on in the same run."""

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
