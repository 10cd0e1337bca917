"""Writes warm-up data for `sft`: trails followed with the tool by three kinds of players, of which only one is right.

The others ask the tool once too seldom or once too often. A model trained on them can call the tool, copy its reply and
answer; RL teaches when to do which. `python -m meshrl.environments.word_trail.demonstrations FOLDER`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import pairwise

from meshrl_examples.demonstrations import run_command
from meshrl_examples.words import Split, words_of

from .trail import STEPS, SYSTEM_PROMPT, Trail, trails

PASSES = 3
SHARE = 0.3

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
"""As its server lists it, its keys in the order in which they come over the wire."""


def conversation(trail: Trail, steps: int) -> list[dict[str, object]]:
    """Of a player who answers after `steps` calls of the tool."""
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
    """With probability `share` a trail is followed right, else one step too few or too many."""
    for trail in tasks:
        off = 0 if source.random() < share else source.choice((-1, 1))
        yield {"messages": conversation(trail, trail.steps + off), "tools": [TOOL]}


def rows(split: Split, /, *, share: float, source: random.Random) -> Iterator[dict[str, list[dict[str, object]]]]:
    """Each training trail comes several times, its player drawn anew."""
    if split == "held_out":
        return demonstrations(trails(split), share=share, source=source)
    tasks = [Trail(start, steps) for steps in STEPS for start in words_of(split)] * PASSES
    source.shuffle(tasks)
    return demonstrations(tasks, share=share, source=source)


if __name__ == "__main__":
    run_command(rows, share=SHARE, share_of="trails followed right")
