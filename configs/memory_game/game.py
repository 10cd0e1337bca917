"""The rules of the memory game and its tasks, for the taskset and the demonstrations."""

from __future__ import annotations

import random

from meshrl_examples.words import Split, words_of

SYSTEM_PROMPT = "Say all words."
ROUNDS = 3
GAMES = {"train": 1536, "held_out": 128}


def right_reply(words: list[str]) -> str:
    """Every word of the game so far, the oldest first."""
    return " ".join(words)


def games(split: Split) -> list[list[str]]:
    """In a fixed order. No held-out word is in a game of the other split."""
    source, words = random.Random(1), words_of(split)
    return [source.sample(words, ROUNDS) for _ in range(GAMES[split])]
