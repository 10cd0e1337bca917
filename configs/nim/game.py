"""The rules of nim and its tasks, for the taskset and the demonstrations.

Who takes the last match wins. From a heap that is no multiple of four the mover wins by leaving one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from meshrl_examples.words import Split

SYSTEM_PROMPT = "Take 1 to 3."
MOST = 3
HEAPS = range(1, 12)
TASKS = {"train": 1536, "held_out": 128}


def moves(heap: int) -> Sequence[int]:
    return range(1, min(MOST, heap) + 1)


def right_move(heap: int) -> int | None:
    """None where every move loses against a player who makes no mistake."""
    return heap % (MOST + 1) or None


def read_move(reply: str, heap: int) -> int | None:
    """None for anything that the rules do not allow."""
    return int(reply) if reply in map(str, moves(heap)) else None


def heaps(split: Split) -> list[int]:
    """In a fixed order. From a held-out heap the policy, which moves first, can win by two right moves or more."""
    source = random.Random(3)
    chosen = [heap for heap in HEAPS if split == "train" or (heap > MOST and right_move(heap) is not None)]
    return [source.choice(chosen) for _ in range(TASKS[split])]
