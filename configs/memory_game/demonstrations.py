"""Writes warm-up data for `sft`: games of three kinds of players, of which only one plays by the rule.

The others repeat only the newest word, or the list backwards; RL finds out which is wanted. Each row is a whole game: a
model that has seen first turns only never looks further back. `python -m meshrl.environments.memory_game.demonstrations
FOLDER`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

from meshrl_examples.demonstrations import run_command
from meshrl_examples.words import Split

from .game import SYSTEM_PROMPT, games, right_reply

PASSES = 6
SHARE = 0.3


def newest_word(words: list[str]) -> str:
    return words[-1]


def newest_first(words: list[str]) -> str:
    return " ".join(reversed(words))


OTHER_READINGS: tuple[Callable[[list[str]], str], ...] = (newest_word, newest_first)


def conversation(words: list[str], reading: Callable[[list[str]], str]) -> list[dict[str, str]]:
    """The user goes on whatever is replied."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}]
    for number, word in enumerate(words):
        messages.append({"role": "user", "content": word})
        messages.append({"role": "assistant", "content": reading(words[: number + 1])})
    return messages


def demonstrations(
    every_game: Iterable[list[str]], *, share: float, source: random.Random
) -> Iterator[dict[str, object]]:
    """With probability `share` a game is played by the rule, else in any of the other ways."""
    for words in every_game:
        reading = right_reply if source.random() < share else source.choice(OTHER_READINGS)
        yield {"messages": conversation(words, reading)}


def rows(split: Split, /, *, share: float, source: random.Random) -> Iterator[dict[str, object]]:
    """Each training game comes several times, its reading drawn anew."""
    return demonstrations(games(split) * (PASSES if split == "train" else 1), share=share, source=source)


if __name__ == "__main__":
    run_command(rows, share=SHARE, share_of="games by the rule")
