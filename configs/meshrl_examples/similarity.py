"""How close a reply is to the right answer, letter by letter; a score that also pays for parts."""

from __future__ import annotations

from collections import defaultdict


def longest_common_subsequence(left: str, right: str) -> int:
    """Length of the longest sequence of characters that both strings contain in order (not necessarily adjacent).

    A row of the usual table is a number with a bit for each character of `right`, 0 where the row grows, so that a
    row takes one addition (Hyyro 2004, "Bit-parallel LCS-length computation revisited", figure 2).
    """
    places: defaultdict[str, int] = defaultdict(int)
    for column, character in enumerate(right):
        places[character] |= 1 << column
    every = row = (1 << len(right)) - 1
    for character in left:
        here = row & places.get(character, 0)
        row = (row + here | row - here) & every
    return len(right) - row.bit_count()


def similarity(reply: str, answer: str) -> float:
    """2 * LCS / (len(reply) + len(answer)): 1 for equal strings, 0 for strings without a common character."""
    total = len(reply) + len(answer)
    return 2 * longest_common_subsequence(reply, answer) / total if total else 1.0
