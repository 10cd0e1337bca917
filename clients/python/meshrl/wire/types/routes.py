"""Routes of a mixture: the experts of each token, which engines report and trainers replay.

An array (T, L, K) for T tokens, L routers and K experts of each: uint8 up to 255 experts a layer, else int16, each with
one value for unknown choices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Routes: TypeAlias = NDArray[np.uint8] | NDArray[np.int16]

MAX_NARROW_EXPERTS = 255
_UNKNOWN = {"uint8": 255, "int16": -1}


def unknown_of(routes: Routes) -> int:
    return _UNKNOWN[routes.dtype.name]


def unknown(num_tokens: int, like: Routes) -> Routes:
    return np.full((num_tokens, *like.shape[1:]), unknown_of(like), dtype=like.dtype)


def signed(routes: Routes) -> NDArray[np.int16]:
    """As int16, with -1 for unknown."""
    if routes.dtype == np.int16:
        return routes.astype(np.int16, copy=False)
    return np.where(routes == unknown_of(routes), np.int16(-1), routes.astype(np.int16))


def narrowed(chosen: NDArray[np.integer], num_experts: int) -> Routes:
    """Chosen experts, -1 for unknown, in the type for so many experts."""
    if num_experts > MAX_NARROW_EXPERTS:
        return chosen.astype(np.int16)
    return chosen.astype(np.uint8)  # of which -1 becomes 255


def joined(parts: Iterable[tuple[int, Routes | None]]) -> Routes | None:
    """Of stretches of tokens, each a number of tokens and their routes if known. None if nothing is known. Raises
    ValueError for routes of different models."""
    stretches = list(parts)
    known = [routes for _, routes in stretches if routes is not None]
    if not known:
        return None
    if len({routes.shape[1:] for routes in known}) > 1:
        shapes = sorted({routes.shape[1:] for routes in known})
        raise ValueError(f"routes of experts are for models of different shapes: {shapes} layers and experts a token")
    if len({routes.dtype for routes in known}) > 1:
        stretches = [(count, None if routes is None else signed(routes)) for count, routes in stretches]
        known = [signed(routes) for routes in known]
    return np.concatenate([unknown(count, known[0]) if routes is None else routes for count, routes in stretches])
