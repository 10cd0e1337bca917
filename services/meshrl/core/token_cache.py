"""A cache of values that are worth their tokens: rendered prompts, scores."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class TokenCache(Generic[KeyT, ValueT]):
    """Values older than `kept_s` go, and beyond `max_tokens` together the least recently used."""

    def __init__(
        self, max_tokens: int, *, kept_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_tokens = max_tokens
        self._kept_s = kept_s
        self._clock = clock
        self._held: OrderedDict[KeyT, tuple[ValueT, int, float]] = OrderedDict()
        self._tokens = 0

    def get(self, key: KeyT | None) -> ValueT | None:
        """None also for a value without a key."""
        if key is None or (found := self._held.get(key)) is None:
            return None
        value, num_tokens, since_s = found
        if self._clock() - since_s > self._kept_s:
            del self._held[key]
            self._tokens -= num_tokens
            return None
        self._held.move_to_end(key)
        return value

    def put(self, key: KeyT | None, value: ValueT, num_tokens: int) -> None:
        if key is None or key in self._held or num_tokens > self._max_tokens:
            return
        self._held[key] = (value, num_tokens, self._clock())
        self._tokens += num_tokens
        while self._tokens > self._max_tokens:
            self._tokens -= self._held.popitem(last=False)[1][1]
