"""Maps the bits of weights to integers that are ordered like the floats, so that a delta can count steps between them.

Neighbouring integers are floats one unit in the last place apart. The map is one to one on bit patterns: NaNs,
infinities and -0 come back to the bit, and so do integer tensors, which are mapped as well.

    ordered(b) = b ^ 0b100..0 for a sign bit of 0, else ~b          all arithmetic modulo 2^bits
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.unsignedinteger]
"""Elements of 1, 2, 4 or 8 bytes as unsigned integers."""

UNSIGNED: Mapping[int, np.dtype[np.unsignedinteger]] = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_SIGNED: Mapping[int, np.dtype[np.signedinteger]] = {width: np.dtype(f"<i{width}") for width in (1, 2, 4, 8)}


def ordered(words: Words) -> Words:
    bits = 8 * words.itemsize
    negative = (words.view(_SIGNED[words.itemsize]) >> (bits - 1)).view(words.dtype)
    return words ^ (negative | words.dtype.type(1 << (bits - 1)))


def from_ordered(places: Words) -> Words:
    bits = 8 * places.itemsize
    negative = (~places.view(_SIGNED[places.itemsize]) >> (bits - 1)).view(places.dtype)
    return places ^ (negative | places.dtype.type(1 << (bits - 1)))


def zigzag(steps: Words) -> Words:
    """0, 1, 2, 3, ... for steps of 0, -1, 1, -2, ..., which are given modulo 2^bits."""
    signed = steps.view(_SIGNED[steps.itemsize])
    return ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)


def unzigzag(codes: Words) -> Words:
    one = codes.dtype.type(1)
    return (codes >> one) ^ (~(codes & one) + one)


def equal_runs(keys: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(begin, end) of each run of equal keys in a sorted array."""
    edges = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)] if len(keys) else []
    yield from pairwise(edges)
