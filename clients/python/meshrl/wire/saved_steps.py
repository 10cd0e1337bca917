"""Saved steps of a run, folders `step_N`, and pinned ones, which are never deleted.

A pinned step has an empty file `weights/step_N.pinned`.
"""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".pinned"


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step}"


def step_of(folder: Path) -> int | None:
    """None unless it is named `step_N`."""
    number = folder.name.removeprefix("step_")
    return int(number) if number != folder.name and number.isdecimal() else None


def steps_in(root: Path, part: str = "") -> list[int]:
    """In order; with `part`, only steps whose folder holds it: a trainer resumes from its `trainer`. Unfinished
    folders have other names."""
    found = (step_of(folder) for folder in root.glob("step_*") if (folder / part).is_dir())
    return sorted(step for step in found if step is not None)


def step_files(root: Path, suffix: str) -> dict[int, Path]:
    """Files `step_N` + `suffix`, by N."""
    found = {step_of(path.with_name(path.name.removesuffix(suffix))): path for path in root.glob(f"step_*{suffix}")}
    return {step: path for step, path in found.items() if step is not None}


def pin_step(weights: Path, step: int) -> None:
    """Raises OSError."""
    _marker(weights, step).touch()


def unpin_step(weights: Path, step: int) -> None:
    """Raises OSError."""
    _marker(weights, step).unlink(missing_ok=True)


def pinned_steps(weights: Path) -> frozenset[int]:
    """None if the folder is missing."""
    return frozenset(step_files(weights, SUFFIX))


def _marker(weights: Path, step: int) -> Path:
    return weights / f"step_{step}{SUFFIX}"
