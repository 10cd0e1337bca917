"""The rules of letter_sort and its tasks, for the taskset and the demonstrations."""

from __future__ import annotations

import random
import string

from meshrl_examples.words import Split

SYSTEM_PROMPT = "Sort all letters."
TURNS = 3
NEW_LETTERS = 2
"""Letters that the user names each turn."""
TASKS = {"train": 1536, "held_out": 128}

Turns = list[list[str]]


def right_reply(named: Turns) -> str:
    return " ".join(sorted(letter for letters in named for letter in letters))


def tasks(split: Split) -> list[Turns]:
    """In a fixed order. No task of one split has the letters of a task of the other."""
    source = random.Random(2)
    seen: set[str] = set()
    drawn: list[Turns] = []
    while len(drawn) < sum(TASKS.values()):
        letters = source.sample(string.ascii_lowercase, TURNS * NEW_LETTERS)
        if (name := "".join(sorted(letters))) in seen:
            continue
        seen.add(name)
        drawn.append([letters[at : at + NEW_LETTERS] for at in range(0, len(letters), NEW_LETTERS)])
    return drawn[: TASKS["held_out"]] if split == "held_out" else drawn[TASKS["held_out"] :]
