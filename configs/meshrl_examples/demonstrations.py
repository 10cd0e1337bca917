"""Writes the demonstrations of an example as files for `sft`: the warm-up before reinforcement learning."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from meshrl_examples.words import Split

Row = Mapping[str, object]


class MakeRows(Protocol):
    """The demonstrations of one split; `share` of the players follow the rule that is rewarded."""

    def __call__(self, split: Split, /, *, share: float, source: random.Random) -> Iterable[Row]: ...


def write_rows(folder: Path, *, train: Iterable[Row], val: Iterable[Row]) -> None:
    """JSON lines, in a folder that is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("val", val)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_demonstrations(rows: MakeRows, folder: Path, *, share: float, seed: int) -> None:
    """Writes train.jsonl, and val.jsonl with held-out tasks and only right players."""
    source = random.Random(seed)
    train, val = rows("train", share=share, source=source), rows("held_out", share=1.0, source=source)
    write_rows(folder, train=train, val=val)


def read_arguments(parser: argparse.ArgumentParser, *, share: float, share_of: str) -> argparse.Namespace:
    """Adds `folder`, `share` and `seed` to the parser; `share_of` names the rows that follow the rule."""
    parser.description = "Write the warm-up's demonstrations."
    parser.add_argument("folder", type=Path, help="where to write train.jsonl and val.jsonl")
    parser.add_argument("--share", type=float, default=share, help=f"share of {share_of} (default {share})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows (default 0)")
    arguments = parser.parse_args()
    if not 0.0 <= arguments.share <= 1.0:
        parser.error(f"--share must be between 0 and 1, got {arguments.share}")
    return arguments


def run_command(rows: MakeRows, *, share: float, share_of: str) -> None:
    arguments = read_arguments(argparse.ArgumentParser(), share=share, share_of=share_of)
    write_demonstrations(rows, arguments.folder, share=arguments.share, seed=arguments.seed)
