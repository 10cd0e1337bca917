"""Writes warm-up data for `sft`: games in which both players take any number that the rules allow.

A model trained on them knows the rules but not how to win, which it learns in self-play. With `--share S` that share of
the moves wins, where a winning move exists.

`python -m meshrl.environments.nim.demonstrations FOLDER [--share S] [--seed N]` writes `train.jsonl`, and `val.jsonl`
with the moves of a player who never errs against one who plays at random. Rows have `messages`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from meshrl.environments.demonstration_files import run_command, write_rows
from meshrl.environments.nim.game import SYSTEM_PROMPT, heaps, moves, right_move

PASSES = 3
SHARE = 0.0
"""Share of moves that are the winning ones."""

Messages = list[dict[str, str]]


def played_game(heap: int, *, shares: tuple[float, float], source: random.Random) -> tuple[Messages, Messages]:
    """The messages of the two players of a game; `shares` is how often each makes the winning move on purpose."""
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


def rows(every_heap: list[int], *, share: float, source: random.Random) -> Iterator[dict[str, object]]:
    """A row for each player of each game who moved."""
    for heap in every_heap:
        for seen in filter(None, played_game(heap, shares=(share, share), source=source)):
            yield {"messages": seen}


def write_demonstrations(folder: Path, *, share: float = SHARE, seed: int) -> None:
    """Writes the rows as JSON lines."""
    source = random.Random(seed)
    train = rows(heaps("train") * PASSES, share=share, source=source)
    right = (played_game(heap, shares=(1.0, 0.0), source=source)[0] for heap in heaps("held_out"))
    write_rows(folder, train=train, val=[{"messages": seen} for seen in right])


def main() -> None:
    """Command `python -m meshrl.environments.nim.demonstrations`."""
    run_command(write_demonstrations, share=SHARE, share_of="moves that are the winning ones")


if __name__ == "__main__":
    main()
