"""Where the programs of a run keep their files, all under one output_dir."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ORCH_TOML = "orch.toml"
INVALID = "config_validation_error.txt"
"""In `Layout.control`: the configuration of the run's orchestrator, and why the trainer does not take it."""


def is_gone(path: Path) -> bool:
    """A file system that does not answer, or refuses, has not lost it."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


@dataclass(frozen=True)
class Layout:
    """Places under `output_dir`. Nothing is created here."""

    output_dir: Path

    @property
    def logs(self) -> Path:
        """See `core.telemetry.log_folder`."""
        return self.output_dir / "logs"

    def log(self, process: str) -> Path:
        """A link to that of the newest start, which `log_place` gives."""
        return self.logs / f"{process}.log"

    def run_folder(self, run_id: str) -> Path:
        """Of a run that joined the mesh of this folder."""
        return self.output_dir / f"run_{run_id.removeprefix('run_') or 'main'}"

    @property
    def control(self) -> Path:
        """By which a trainer of several runs finds the run of this folder, and answers its owner."""
        return self.output_dir / "control"

    @property
    def configs(self) -> Path:
        return self.output_dir / "configs"

    def config(self, process: str) -> Path:
        """The resolved TOML."""
        return self.configs / f"{process}.toml"

    @property
    def slurm(self) -> Path:
        """The batch script, and a log of each job."""
        return self.output_dir / "slurm"

    @property
    def lock(self) -> Path:
        """Locked by the `rl` that it names."""
        return self.output_dir / "rl.lock"

    @property
    def credentials(self) -> Path:
        """For the owner alone."""
        return self.output_dir / "credentials"

    @property
    def metrics_jsonl(self) -> Path:
        return self.output_dir / "metrics.jsonl"

    @property
    def summary_json(self) -> Path:
        return self.output_dir / "summary.json"

    @property
    def traces(self) -> Path:
        return self.output_dir / "traces"

    @property
    def rollouts(self) -> Path:
        return self.output_dir / "rollouts"

    @property
    def weights(self) -> Path:
        """Snapshots in Hugging Face format, a folder a step."""
        return self.output_dir / "weights"

    @property
    def checkpoints(self) -> Path:
        """To resume from, a folder a step."""
        return self.output_dir / "checkpoints"

    @property
    def broadcasts(self) -> Path:
        return self.output_dir / "broadcasts"

    @property
    def ledger(self) -> Path:
        return self.output_dir / "ledger.sqlite"
