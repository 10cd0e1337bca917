"""Writes the demonstrations of an example as files for `sft`, and has the command line that the examples share.

Demonstrations are the warm-up before reinforcement learning: only a share of them follows the rule that is rewarded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol


class WriteDemonstrations(Protocol):
    """Writes train.jsonl and val.jsonl to `folder`; `share` of the training rows follow the rule, by `seed`."""

    def __call__(self, folder: Path, *, share: float, seed: int) -> None: ...


def write_rows(folder: Path, *, train: Iterable[Mapping[str, object]], val: Iterable[Mapping[str, object]]) -> None:
    """Writes the rows of both parts as JSON lines into `folder`, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("val", val)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_command(write: WriteDemonstrations, *, share: float, share_of: str) -> None:
    """The command line of an example's module `demonstrations`; `share_of` makes the examples that follow the rule."""
    parser = argparse.ArgumentParser(description="Write the warm-up's demonstrations.")
    parser.add_argument("folder", type=Path, help="where to write train.jsonl and val.jsonl")
    parser.add_argument("--share", type=float, default=share, help=f"share of {share_of} (default {share})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows (default 0)")
    arguments = parser.parse_args()
    if not 0.0 <= arguments.share <= 1.0:
        parser.error(f"--share must be between 0 and 1, got {arguments.share}")
    write(arguments.folder, share=arguments.share, seed=arguments.seed)
