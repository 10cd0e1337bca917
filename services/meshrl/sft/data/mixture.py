"""The order in which rows are trained, over one part of the data or several mixed.

Equal sizes and settings give the same order, so a Cursor is all that a run needs to go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

StoppingStrategy = Literal["first_exhausted", "all_exhausted"]


@dataclass(frozen=True, kw_only=True, order=True)
class Cursor:
    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One row of the order. `passed` is the share of its epoch up to it."""

    cursor: Cursor
    part: int
    row: int
    passed: float


class Mixture:
    """Endless order over the rows of parts with `sizes`, a new one each epoch. Without `probabilities` parts take
    turns. A part that is through before its epoch begins again in another order."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        probabilities: Sequence[float] | None = None,
        stopping_strategy: StoppingStrategy = "all_exhausted",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.sizes = tuple(sizes)
        self._probabilities = None if probabilities is None else np.cumsum(probabilities)
        self._enough = min if stopping_strategy == "all_exhausted" else max
        self._shuffle = shuffle
        self._seed = seed

    def draws(self, start: Cursor) -> Iterator[Draw]:
        epoch, skip = start.epoch, start.position
        while True:
            for draw in self._epoch(epoch):
                if draw.cursor.position >= skip:
                    yield draw
            epoch, skip = epoch + 1, 0

    def _epoch(self, epoch: int) -> Iterator[Draw]:
        taken = [0] * len(self.sizes)
        orders = [self._order(epoch, part, 0) for part in range(len(self.sizes))]
        turns = self._turns(epoch)
        position, passed = 0, 0.0
        while passed < 1.0:
            part = next(turns)
            lap, at = divmod(taken[part], self.sizes[part])
            if at == 0 and lap:
                orders[part] = self._order(epoch, part, lap)
            taken[part] += 1
            passed = self._enough(min(1.0, count / size) for count, size in zip(taken, self.sizes, strict=True))
            yield Draw(
                cursor=Cursor(epoch=epoch, position=position), part=part, row=int(orders[part][at]), passed=passed
            )
            position += 1

    def _order(self, epoch: int, part: int, lap: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self.sizes[part])
        return np.random.default_rng([self._seed & 0xFFFFFFFF, epoch, part, lap]).permutation(self.sizes[part])

    def _turns(self, epoch: int) -> Iterator[int]:
        count = len(self.sizes)
        if self._probabilities is None:
            while True:
                yield from range(count)
        source = np.random.default_rng([self._seed & 0xFFFFFFFF, epoch])
        while True:
            for value in source.random(1024):
                yield min(int(np.searchsorted(self._probabilities, value, side="right")), count - 1)
