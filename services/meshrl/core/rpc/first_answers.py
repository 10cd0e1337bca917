"""Remembers mutating calls by request id: a repeated one gets the first answer, another one under the id none."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from meshrl.wire.errors import MeshError, Reason

Answer = TypeVar("Answer")


class FirstAnswers(Generic[Answer]):
    """Remembers the last `keep` requests. A request without an id is always new."""

    def __init__(self, *, keep: int = 4096) -> None:
        self._keep = keep
        self._contents: OrderedDict[str, bytes] = OrderedDict()
        self._answers: dict[str, asyncio.Task[Answer]] = {}

    def check(self, request_id: str, content: bytes) -> None:
        """Remembers a request's content. Raises DUPLICATE_REQUEST where the id had another one."""
        if not request_id:
            return
        if self._contents.setdefault(request_id, content) != content:
            raise MeshError(
                Reason.DUPLICATE_REQUEST, f"request_id {request_id!r} was used for another request; draw a new one"
            )
        while len(self._contents) > self._keep:
            self._answers.pop(self._contents.popitem(last=False)[0], None)

    async def once(self, request_id: str, content: bytes, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """Runs `make` for a new id, else waits for the first run; one that failed may be tried again. Raises what
        `check` and `make` raise."""
        self.check(request_id, content)
        task = self._answers.get(request_id)
        if task is None:
            task = asyncio.ensure_future(make())
            if request_id:
                self._answers[request_id] = task
        try:
            # A caller that hangs up must not cancel what others, or its own retry, wait for.
            return await asyncio.shield(task)
        except MeshError:
            if self._answers.get(request_id) is task:
                del self._answers[request_id]
            raise
