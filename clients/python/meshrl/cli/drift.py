"""`meshrl doctor --drift`: runs the policy at learning rate 0, where all mismatch of engine and trainer is noise."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click

from meshrl.cli.command import CliError, print_table
from meshrl.cli.run_folder import RunFolder
from meshrl.diagnosis.history import Column, MetricsHistory

DEADLINE_S = 1800.0
"""How long one of the runs may take."""
_OFF = ("--no-wandb", "--no-ckpt", "--no-orchestrator.eval")


@dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """The mismatch of one engine and one kernel over some steps: mean and largest |difference| of logprobs, and KL."""

    engine: str
    kernel: str
    changed: str
    steps: int
    mean_abs: float
    most_abs: float
    mean_kl: float
    before: float | None
    """mean_abs of the run's own last steps, which has the lag of its weights as well."""


def measure_drift(folder: RunFolder, steps: int, varied: Sequence[str]) -> list[NoiseFloor]:
    """The noise floor with the run's own configuration, and with each of the changes KEY=VALUE. Raises CliError."""
    config = folder.path / "configs/rl.toml"
    if not config.exists():
        raise CliError(f"{folder.path} has no configs/rl.toml: name the output folder of a run that `rl` started")
    if folder.is_running():
        raise CliError(f"the run in {folder.path} goes on: it and another would share its devices; end it first")
    if find_spec("meshrl.launch") is None:
        raise CliError("--drift starts `rl`, which is not installed here: pip install meshrl")
    return [_measured(folder, config, steps, change) for change in ("", *varied)]


def _measured(folder: RunFolder, config: Path, steps: int, change: str) -> NoiseFloor:
    key, _, value = change.partition("=")
    if change and not (key and value):
        raise CliError(f"--vary must be KEY=VALUE, such as trainer.model.attn=sdpa, got {change!r}")
    place = next(path for number in itertools.count(1) if not (path := folder.path / f"drift/{number}").exists())
    command = [sys.executable, "-m", "meshrl.launch.main", "@", str(config), "--output-dir", str(place), *_OFF]
    command += ["--max-steps", str(steps), "--trainer.optim.lr", "0"]
    if saved := folder.saved_steps():
        command += ["--model.name", str(folder.weights / f"step_{saved[-1]}")]
    if change:
        command += [f"--{key}", value]
    click.echo(f"{steps} steps at learning rate 0{f' with {change}' if change else ''}, in {place}", err=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CliError(
            f"no end within {DEADLINE_S:.0f} s; see meshrl logs -o {place}, or take fewer --steps"
        ) from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise CliError(f"the run ended with {done.returncode}: {' '.join(last)}; see meshrl logs -o {place}")
    return noise_floor(RunFolder(place), change, before=_own(folder))


def noise_floor(made: RunFolder, change: str, *, before: float | None) -> NoiseFloor:
    """What a run at learning rate 0 has shown. Raises CliError for one without mismatch metrics."""
    columns = _columns(made)
    found = [columns.get(f"mismatch_{name}") for name in ("abs/all/mean", "abs/all/max", "kl/all/mean")]
    mean_abs, most_abs, mean_kl = ([] if column is None else list(column.values) for column in found)
    if not mean_abs:
        raise CliError(f"{made.path} has no step with mismatch_abs: see meshrl logs -o {made.path}")
    return NoiseFloor(
        engine=str(made.config("inference").get("engine", "?")),
        kernel=str(made.config("trainer").get("model", {}).get("attn", "?")),
        changed=change or "-",
        steps=len(mean_abs),
        mean_abs=statistics.fmean(mean_abs),
        most_abs=max(most_abs),
        mean_kl=statistics.fmean(mean_kl),
        before=before,
    )


def _own(folder: RunFolder) -> float | None:
    column = _columns(folder).get("mismatch_abs/all/mean")
    return None if column is None else statistics.fmean(column.values[-5:])


def print_floors(floors: Sequence[NoiseFloor]) -> None:
    """Prints a table for people."""
    print_table(
        ("engine", "attention", "changed", "steps", "mean |diff|", "most |diff|", "mean KL", "in the run"),
        [
            (one.engine, one.kernel, one.changed, one.steps, f"{one.mean_abs:.2e}", f"{one.most_abs:.2e}",
             f"{one.mean_kl:.2e}", None if one.before is None else f"{one.before:.2e}")
            for one in floors
        ],
    )  # fmt: skip


def _columns(folder: RunFolder) -> dict[str, Column]:
    history = MetricsHistory(folder.path / "metrics.jsonl")
    history.read_on()
    return history.series.columns
