"""Which weights are evaluated: the served ones, and the checkpoints of a run in `--weights-dir`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.core.config import ConfigError
from meshrl.wire.saved_steps import step_folder, steps_in

BASE = "base"
FINAL = "final"


@dataclass(frozen=True, kw_only=True)
class EvaluatedWeights:
    """`folder` None: as the engine was started; `name` stands in every result."""

    name: str
    step: int
    folder: Path | None


def weights_to_evaluate(weights_dir: Path | None, steps: Sequence[int] | None, *, base: bool) -> list[EvaluatedWeights]:
    """The base model first, then the checkpoints by step: all, or those of `steps`. Raises ConfigError for missing
    ones."""
    found = [EvaluatedWeights(name=BASE, step=0, folder=None)] if base else []
    if weights_dir is None:
        return found
    weights_dir = weights_dir.resolve()
    if not weights_dir.is_dir():
        raise ConfigError(f"weights_dir {str(weights_dir)!r}: there is no such folder")
    there = {step: step_folder(weights_dir, step) for step in steps_in(weights_dir)}
    final = weights_dir / FINAL
    if not there and not steps and final.is_dir():
        return [*found, EvaluatedWeights(name=FINAL, step=1, folder=final)]
    if not there:
        raise ConfigError(
            f"weights_dir {str(weights_dir)!r} holds no folder step_N with weights; give the folder `weights` in the"
            " output_dir of a run with checkpoints (--ckpt --ckpt.interval 10)"
        )
    if missing := sorted(set(steps or ()) - there.keys()):
        raise ConfigError(
            f"steps {', '.join(map(str, missing))} are not in weights_dir {str(weights_dir)!r}; it has"
            f" {', '.join(map(str, sorted(there)))}"
        )
    chosen = sorted(set(steps)) if steps else sorted(there)
    return [*found, *(EvaluatedWeights(name=f"step_{step}", step=step, folder=there[step]) for step in chosen)]
