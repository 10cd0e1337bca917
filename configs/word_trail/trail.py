"""The words of the trail, their order and the tasks."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from meshrl_examples.words import Split, every_word, words_of

SYSTEM_PROMPT = "Follow the trail."
STEPS = (1, 2, 3)


class Trail(NamedTuple):
    """The word `steps` words after `start`."""

    start: str
    steps: int

    @property
    def prompt(self) -> str:
        return f"{self.start} {self.steps}"

    @property
    def words(self) -> list[str]:
        words = [self.start]
        for _ in range(self.steps):
            words.append(word_after(words[-1]))
        return words


@cache
def _successors() -> dict[str, str]:
    words = every_word()
    return dict(zip(words, (*words[1:], words[0]), strict=True))


def word_after(word: str) -> str:
    """Raises KeyError for a word that is not on the trail."""
    return _successors()[word]


def trails(split: Split) -> list[Trail]:
    """The words of a split start once each where held out, else once for each number of steps.

    Each word comes before any comes again, and the number of steps changes from one to the next, so that the first
    tasks are as hard as all of them.
    """
    starts, rounds = words_of(split), 1 if split == "held_out" else len(STEPS)
    return [
        Trail(start, STEPS[(index + shift) % len(STEPS)])
        for shift in range(rounds)
        for index, start in enumerate(starts)
    ]
