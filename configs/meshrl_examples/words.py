"""The made-up words of the examples with several turns, the same on every machine, in two splits."""

from __future__ import annotations

import itertools
import random
from typing import Literal

Split = Literal["train", "held_out"]

HELD_OUT = 128
"""Words that neither warm-up nor training uses."""

_CONSONANTS, _VOWELS = "bdfgklmnprst", "aeiou"


def every_word() -> list[str]:
    """All 720 words of a consonant, a vowel and a consonant, in a fixed shuffled order."""
    words = ["".join(letters) for letters in itertools.product(_CONSONANTS, _VOWELS, _CONSONANTS)]
    random.Random(0).shuffle(words)
    return words


def words_of(split: Split) -> list[str]:
    words = every_word()
    return words[:HELD_OUT] if split == "held_out" else words[HELD_OUT:]
