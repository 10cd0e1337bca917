"""Writes the warm-up's data: trails followed with the tool by three kinds of players, of which only one is right.

Some ask the tool as often as there are steps; others ask once too seldom or once too often. A model that learned from
them can call the tool, copy what it says and answer, and does not know when. The reward tells. Each row is a whole
conversation with the tool as the chat template shows it.

`python -m meshrl.environments.word_trail.demonstrations FOLDER [--share S] [--seed N]` writes `train.jsonl`, and
`val.jsonl` with right players from held-out words. Rows have `messages` and `tools`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from meshrl.environments.word_trail.trail import SYSTEM_PROMPT, Trail, trails

PASSES = 3
SHARE = 0.3
"""Share of trails followed right."""

TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "after",
        "description": "The word after it.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"title": "Word", "type": "string"}},
            "required": ["word"],
            "title": "afterArguments",
        },
    },
}
"""The tool as its server lists it, its keys in the order in which they come over the wire."""


def conversation(trail: Trail, steps: int) -> list[dict[str, object]]:
    """The messages of a player who answers after `steps` calls of the tool."""
    words = Trail(trail.start, steps).words
    messages: list[dict[str, object]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": trail.prompt},
    ]
    for number, (asked, told) in enumerate(pairwise(words)):
        call = {"name": "after", "arguments": {"word": asked}}
        messages += [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": f"call_{number}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call_{number}", "content": told},
        ]
    return [*messages, {"role": "assistant", "content": words[-1]}]


def demonstrations(
    tasks: Iterable[Trail], *, share: float, source: random.Random
) -> Iterator[dict[str, list[dict[str, object]]]]:
    """One row a trail. With probability `share` it is followed right, else one step too few or too many."""
    for trail in tasks:
        off = 0 if source.random() < share else source.choice((-1, 1))
        yield {"messages": conversation(trail, trail.steps + off), "tools": [TOOL]}


def write_demonstrations(folder: Path, *, share: float = SHARE, seed: int) -> None:
    """Writes the rows as JSON lines; each training trail comes several times, its player drawn anew."""
    source = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = trails("train") * PASSES
    source.shuffle(tasks)
    train = demonstrations(tasks, share=share, source=source)
    val = demonstrations(trails("held_out"), share=1.0, source=source)
    for name, rows in (("train", train), ("val", val)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Command `python -m meshrl.environments.word_trail.demonstrations`."""
    parser = argparse.ArgumentParser(description="Write the warm-up's demonstrations.")
    parser.add_argument("folder", type=Path, help="where to write train.jsonl and val.jsonl")
    parser.add_argument("--share", type=float, default=SHARE, help=f"share of trails followed right (default {SHARE})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the players (default 0)")
    arguments = parser.parse_args()
    if not 0.0 <= arguments.share <= 1.0:
        parser.error(f"--share must be between 0 and 1, got {arguments.share}")
    write_demonstrations(arguments.folder, share=arguments.share, seed=arguments.seed)


if __name__ == "__main__":
    main()
