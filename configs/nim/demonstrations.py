"""Writes warm-up data for `sft`: games in which both players take any number that the rules allow.

A model trained on them knows the rules but not how to win, which it learns in self-play. With `--share S` that share of
the moves wins, where a winning move exists. `python -m meshrl.environments.nim.demonstrations FOLDER`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from meshrl_examples.demonstrations import run_command
from meshrl_examples.words import Split

from .game import SYSTEM_PROMPT, heaps, moves, right_move

PASSES = 3
SHARE = 0.0

Messages = list[dict[str, str]]


def played_game(heap: int, *, shares: tuple[float, float], source: random.Random) -> tuple[Messages, Messages]:
    """The messages of the two players; `shares` is how often each makes the winning move on purpose."""
    both: tuple[Messages, Messages] = ([], [])
    mover = 0
    while heap:
        right = right_move(heap)
        taken = right if right is not None and source.random() < shares[mover] else source.choice(moves(heap))
        seen = both[mover] or [{"role": "system", "content": SYSTEM_PROMPT}]
        both[mover][:] = [
            *seen,
            {"role": "user", "content": str(heap)},
            {"role": "assistant", "content": str(taken)},
        ]
        heap, mover = heap - taken, 1 - mover
    return both


def rows(split: Split, /, *, share: float, source: random.Random) -> Iterable[dict[str, object]]:
    """Of each training game a row for each player who moved; of a held-out one the first player's, against one who
    plays at random."""
    if split == "held_out":
        return [{"messages": played_game(heap, shares=(share, 0.0), source=source)[0]} for heap in heaps(split)]
    games = (played_game(heap, shares=(share, share), source=source) for heap in heaps(split) * PASSES)
    return ({"messages": seen} for players in games for seen in players if seen)


if __name__ == "__main__":
    run_command(rows, share=SHARE, share_of="moves that are the winning ones")
