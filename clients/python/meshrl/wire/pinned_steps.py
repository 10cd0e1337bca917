"""Steps of a run whose checkpoints are never deleted: an empty file `weights/step_N.pinned` beside the step's folder.

`meshrl weights pin` makes and removes it; a trainer that deletes old checkpoints (`ckpt.keep_last`) looks for it.
"""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".pinned"


def pin_step(weights: Path, step: int) -> None:
    """Pins a step; `weights` is the folder that its snapshot is in. Raises OSError."""
    _marker(weights, step).touch()


def unpin_step(weights: Path, step: int) -> None:
    """Gives a step free again. Raises OSError."""
    _marker(weights, step).unlink(missing_ok=True)


def pinned_steps(weights: Path) -> frozenset[int]:
    """The steps that are pinned; none where the folder is not there."""
    names = (path.name.removeprefix("step_").removesuffix(SUFFIX) for path in weights.glob(f"step_*{SUFFIX}"))
    return frozenset(int(name) for name in names if name.isdecimal())


def _marker(weights: Path, step: int) -> Path:
    return weights / f"step_{step}{SUFFIX}"
