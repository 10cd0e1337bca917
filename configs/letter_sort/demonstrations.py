"""Writes warm-up data for `sft`: conversations that put the letters into one of three orders, of which one is rewarded.

The others are that in which the letters were named, and the alphabetical one backwards. RL finds out which is wanted.
`python -m meshrl.environments.letter_sort.demonstrations FOLDER`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

from meshrl_examples.demonstrations import run_command
from meshrl_examples.words import Split

from .letters import SYSTEM_PROMPT, Turns, right_reply, tasks

PASSES = 6
SHARE = 0.3


def as_named(named: Turns) -> str:
    return " ".join(letter for letters in named for letter in letters)


def backwards(named: Turns) -> str:
    return right_reply(named)[::-1]


OTHER_ORDERS: tuple[Callable[[Turns], str], ...] = (as_named, backwards)


def conversation(named: Turns, order: Callable[[Turns], str]) -> list[dict[str, str]]:
    """The user goes on whatever is replied."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}]
    for number, letters in enumerate(named):
        messages.append({"role": "user", "content": " ".join(letters)})
        messages.append({"role": "assistant", "content": order(named[: number + 1])})
    return messages


def demonstrations(every_task: Iterable[Turns], *, share: float, source: random.Random) -> Iterator[dict[str, object]]:
    """With probability `share` a row is in alphabetical order, else in any of the other orders."""
    for named in every_task:
        order = right_reply if source.random() < share else source.choice(OTHER_ORDERS)
        yield {"messages": conversation(named, order)}


def rows(split: Split, /, *, share: float, source: random.Random) -> Iterator[dict[str, object]]:
    """Each training task comes several times, its order drawn anew."""
    return demonstrations(tasks(split) * (PASSES if split == "train" else 1), share=share, source=source)


if __name__ == "__main__":
    run_command(rows, share=SHARE, share_of="conversations in alphabetical order")
