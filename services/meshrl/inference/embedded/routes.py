"""Keeps the experts that each token of a slot went through, beside the slots' cache.

Shapes: S slots, M tokens a slot, L routers, K experts of each, N tokens whose routes are kept or read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.models.routers import UNKNOWN, RouterChoice, Routers
from meshrl.wire.types.routes import Routes, narrowed


class RouteStore:
    def __init__(self, routers: Routers, *, num_slots: int, max_len: int) -> None:
        """Raises ValueError for a model without experts."""
        if routers.shape is None:
            raise ValueError(
                "inference.enable_return_routed_experts is set, but this model has no experts; leave it out"
            )
        self._shape = routers.shape
        shape = (num_slots, max_len, self._shape.layers, self._shape.per_token)
        self._routes_SMLK = narrowed(np.full(shape, UNKNOWN, dtype=np.int16), self._shape.experts)
        self._places: tuple[torch.Tensor | slice, NDArray[np.int64], NDArray[np.int64]] | None = None
        routers.watchers.append(self._look)

    @contextmanager
    def noting(
        self, slots_N: NDArray[np.int64], positions_N: NDArray[np.int64], tokens_N: torch.Tensor | slice = slice(None)
    ) -> Iterator[None]:
        """Keeps the routes of a forward pass, of its tokens `tokens_N`, at these places."""
        self._places = tokens_N, slots_N, positions_N
        try:
            yield
        finally:
            self._places = None

    def of(self, slot: int, start: int, end: int) -> Routes:
        """(N, L, K) of the tokens [start, end) of a slot; a copy."""
        return self._routes_SMLK[slot, start:end].copy()

    def copy_slot(self, source: int, target: int, length: int) -> None:
        self._routes_SMLK[target, :length] = self._routes_SMLK[source, :length]

    def swap_slots(self, one: int, other: int, length: int) -> None:
        self._routes_SMLK[[one, other], :length] = self._routes_SMLK[[other, one], :length]

    def _look(self, choice: RouterChoice) -> None:
        if self._places is not None:  # else a prompt is scored
            tokens_N, slots_N, positions_N = self._places
            self._routes_SMLK[slots_N, positions_N, choice.router] = choice.chosen[tokens_N].cpu().numpy()
