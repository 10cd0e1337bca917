"""Weights as integers in the order of their values: what the steps of a delta are counted in.

A float's bits, read as a sign and a magnitude, order as floats do once they are mapped to one rising range of integers,
in which neighbours are one unit in the last place apart. The map takes every bit pattern to another one, so NaNs,
infinities and -0 come back to the bit, and integers, which are mapped too, come to no harm.

    ordered(b) = b ^ 0b100..0 for a sign bit of 0, else ~b          all arithmetic modulo 2^bits
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Elements of 1, 2, 4 or 8 bytes as unsigned integers."""

UNSIGNED: Mapping[int, np.dtype[np.unsignedinteger[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
_SIGNED: Mapping[int, np.dtype[np.signedinteger[Any]]] = {
    1: np.dtype("<i1"),
    2: np.dtype("<i2"),
    4: np.dtype("<i4"),
    8: np.dtype("<i8"),
}


def ordered(words: Words) -> Words:
    """The place of each bit pattern in the order of values."""
    bits = 8 * words.itemsize
    negative = (words.view(_SIGNED[words.itemsize]) >> (bits - 1)).view(words.dtype)
    return words ^ (negative | words.dtype.type(1 << (bits - 1)))


def from_ordered(places: Words) -> Words:
    """The bit patterns at places in the order of values."""
    bits = 8 * places.itemsize
    negative = (~places.view(_SIGNED[places.itemsize]) >> (bits - 1)).view(places.dtype)
    return places ^ (negative | places.dtype.type(1 << (bits - 1)))


def zigzag(steps: Words) -> Words:
    """0, 1, 2, 3, ... for steps of 0, -1, 1, -2, ..., which are given modulo 2^bits."""
    signed = steps.view(_SIGNED[steps.itemsize])
    return ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)


def unzigzag(codes: Words) -> Words:
    """The steps, modulo 2^bits, of what `zigzag` made."""
    one = codes.dtype.type(1)
    return (codes >> one) ^ (~(codes & one) + one)
