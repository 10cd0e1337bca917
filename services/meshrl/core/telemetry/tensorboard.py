"""The metrics of a run for TensorBoard, where `log.tensorboard` is set; opened by `monitor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from meshrl.core.config import ConfigError
from meshrl.core.telemetry.monitor import SampleRow


class TensorBoardSink:
    """Event files for TensorBoard: metrics, samples as text, distributions as histograms; written by tensorboardX."""

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
