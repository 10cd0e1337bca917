"""Checks the output folder before a run starts: finds an older run, empties it, reports that it cannot be written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from meshrl.core.config import ConfigError
from meshrl.core.paths import Layout

_OF_A_RUN = (
    "bench", "broadcasts", "checkpoints", "configs", "credentials", "ledger.sqlite", "ledger.sqlite-journal",
    "ledger.sqlite-shm", "ledger.sqlite-wal", "logs", "metrics.jsonl", "metrics_targets", "rl.lock", "rollouts",
    "slurm", "state", "summary.json", "traces", "trainer_epoch", "weight_hub", "weights",
)  # fmt: skip


@contextmanager
def writing_to(output_dir: Path) -> Iterator[None]:
    """Raises ConfigError in place of an OSError of its block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"output_dir {str(output_dir)!r} cannot be written: {error.strerror}; choose another"
        ) from error


def empty_folder(output_dir: Path, keep: Sequence[Path] = ()) -> None:
    """Deletes an earlier run's files, except its credentials and this one's lock. Raises ConfigError for a folder that
    is no run's, or holds the home folder, the current one or one of `keep`."""
    folder = output_dir.resolve()
    if not folder.exists():
        return
    problem = _why_not(folder, keep)
    if problem is not None:
        raise ConfigError(f"clean_output_dir: {folder} is not emptied: {problem}; choose another output_dir")
    delete_all_but(folder, (Layout(folder).lock, Layout(folder).credentials))


def delete_all_but(folder: Path, kept: Sequence[Path] = ()) -> None:
    for entry in folder.iterdir():
        if entry in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _why_not(folder: Path, keep: Sequence[Path]) -> str | None:
    if not folder.is_dir():
        return "it is no folder"
    for place, what in ((Path.home(), "the home folder"), (Path.cwd(), "the current folder")):
        if place.resolve().is_relative_to(folder):
            return f"it is or holds {what}"
    for needed in keep:
        if needed.exists() and needed.resolve().is_relative_to(folder):
            return f"it holds {str(needed)!r}, which the run begins with"
    if any(Layout(folder).config(program).exists() for program in ("rl", "sft")):
        return None
    strangers = sorted(entry.name for entry in folder.iterdir() if entry.name not in _OF_A_RUN)
    if strangers:
        return f"it does not look like the folder of a run (it holds {', '.join(strangers[:3])})"
    return None


def holds_a_run(output_dir: Path) -> bool:
    """Whether there is more than configurations, a batch script, credentials and a lock."""
    if not output_dir.is_dir():
        return False
    layout = Layout(output_dir)
    return any(
        entry not in (layout.configs, layout.credentials, layout.lock, layout.slurm) for entry in output_dir.iterdir()
    )
