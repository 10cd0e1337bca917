"""Which steps of a run are saved: those with a folder `step_N`; and which are never deleted.

A pinned step has an empty file `weights/step_N.pinned` beside its folder, which a trainer that deletes old checkpoints
(`ckpt.keep_last`) looks for.
"""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".pinned"


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step}"


def step_of(folder: Path) -> int | None:
    """The step of a folder `step_N`; None for any other name."""
    number = folder.name.removeprefix("step_")
    return int(number) if number != folder.name and number.isdecimal() else None


def steps_in(root: Path, part: str = "") -> list[int]:
    """The steps that have a folder below `root`, in order; with `part`, only if that folder holds `part`: a trainer
    resumes from its own, `trainer`. Folders that are being written or deleted have other names."""
    found = (step_of(folder) for folder in root.glob("step_*") if (folder / part).is_dir())
    return sorted(step for step in found if step is not None)


def pin_step(weights: Path, step: int) -> None:
    """`weights` is the folder of its snapshot. Raises OSError."""
    _marker(weights, step).touch()


def unpin_step(weights: Path, step: int) -> None:
    """Raises OSError."""
    _marker(weights, step).unlink(missing_ok=True)


def pinned_steps(weights: Path) -> frozenset[int]:
    """None if the folder is missing."""
    names = (path.name.removeprefix("step_").removesuffix(SUFFIX) for path in weights.glob(f"step_*{SUFFIX}"))
    return frozenset(int(name) for name in names if name.isdecimal())


def _marker(weights: Path, step: int) -> Path:
    return weights / f"step_{step}{SUFFIX}"
