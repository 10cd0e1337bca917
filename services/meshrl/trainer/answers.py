"""Remembers the answer to each mutating call by request id, so that a repeated call gets the first answer.

Used by `TrainerServicer` for SaveCheckpoint.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from meshrl.wire.errors import MeshError, Reason

Answer = TypeVar("Answer")


class Answers(Generic[Answer]):
    """Remembers the answers to the last `keep` requests; one that failed may be tried again under the same id."""

    def __init__(self, *, keep: int = 1024) -> None:
        self._keep = keep
        self._calls: OrderedDict[str, tuple[bytes, asyncio.Task[Answer]]] = OrderedDict()

    async def once(self, request_id: str, payload: bytes, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """Runs `make` for a new id, else waits for the first run. Raises DUPLICATE_REQUEST for another payload."""
        known = self._calls.get(request_id)
        if known is not None and known[0] != payload:
            raise MeshError(
                Reason.DUPLICATE_REQUEST,
                f"request_id {request_id!r} was used for another request; make a new UUID for each",
            )
        if known is None:
            task = asyncio.ensure_future(make())
            known = self._calls[request_id] = (payload, task)
            while len(self._calls) > self._keep:
                self._calls.popitem(last=False)
        try:
            # A caller that hangs up must not cancel what others, or its own retry, wait for.
            return await asyncio.shield(known[1])
        except MeshError:
            self._calls.pop(request_id, None)
            raise
