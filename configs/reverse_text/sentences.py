"""The prompt and the sentences of the example: real English, the same everywhere, in two splits."""

from __future__ import annotations

import itertools
import random

from meshrl_examples.words import Split

SYSTEM_PROMPT = "Reverse the text."

HELD_OUT = 128
"""Sentences that neither warm-up nor training uses."""

# fmt: off
SUBJECTS = (
    "I", "We", "You", "They", "He", "She", "Tom", "Ann", "Ben", "Amy", "Dad", "Mom", "Max", "Eve", "Sam", "Leo",
    "Ida", "Ray", "Joan", "Karl", "Ruth", "Paul", "The nurse", "A pilot", "My son", "The boy", "A girl", "Our cook",
    "The judge", "My aunt",
)

PREDICATES = (
    "ran home", "saw a fox", "ate pie", "sat down", "got up", "lost a key", "drank tea", "made soup",
    "fell ill", "went out", "came back", "swam far", "sang well", "won a cup", "cut wood", "dug a pit",
    "hid a map", "fed a hen", "met a king", "paid cash", "read a book", "rode a bike", "sold milk",
    "took a nap", "wore red", "woke up", "felt cold", "gave hope", "had lunch", "held on", "kept bees",
    "knew why", "left town", "lit a fire", "built a hut", "bought figs", "chose blue", "drew a line",
    "drove west", "flew east", "found gold", "grew corn", "heard rain", "hit a wall", "led us", "laid bricks",
    "rang a bell", "said yes", "sent help", "shut it", "slept late", "spoke up", "stood by", "swept up",
    "told lies", "threw mud", "wept", "wrote back", "broke it", "caught fish",
)
# fmt: on


def sentences(split: Split) -> list[str]:
    """In a fixed shuffled order; 7 to 21 characters each."""
    everything = [f"{subject} {predicate}." for subject, predicate in itertools.product(SUBJECTS, PREDICATES)]
    random.Random(0).shuffle(everything)
    return everything[:HELD_OUT] if split == "held_out" else everything[HELD_OUT:]
