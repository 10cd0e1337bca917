"""Requests repeated under one id: a mutating call gets its first answer again, a group is refused."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container
from typing import Generic, TypeVar

from meshrl.wire.errors import MeshError, Reason

Answer = TypeVar("Answer")

REMEMBERED_S = 600.0
REMEMBERED_REQUESTS = 10_000


class FirstAnswers(Generic[Answer]):
    """Answers a repeated call as before, and refuses another under its id. Keeps the last `keep`; a request without
    id is always new."""

    def __init__(self, *, keep: int = 4096) -> None:
        self._keep = keep
        self._contents: OrderedDict[str, bytes] = OrderedDict()
        self._answers: dict[str, asyncio.Task[Answer]] = {}

    def check(self, request_id: str, content: bytes) -> None:
        """Raises DUPLICATE_REQUEST if the id had other content."""
        if not request_id:
            return
        if self._contents.setdefault(request_id, content) != content:
            raise MeshError(
                Reason.DUPLICATE_REQUEST, f"request_id {request_id!r} was used for another request; draw a new one"
            )
        while len(self._contents) > self._keep:
            self._answers.pop(self._contents.popitem(last=False)[0], None)

    async def once(self, request_id: str, content: bytes, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """Runs `make` for a new id, else waits for the first run, which may be tried again after a failure. Raises
        as `check` and `make` do."""
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


class SeenRequests:
    """Ids of admitted requests, each for REMEMBERED_S, at most REMEMBERED_REQUESTS."""

    def __init__(self) -> None:
        self._admitted_s: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._admitted_s)

    def refuse(self, request_id: str, now_s: float, running: Container[str] = ()) -> None:
        """Raises DUPLICATE_REQUEST for an admitted id. `running` ones are never forgotten."""
        while self._admitted_s:
            oldest, admitted_s = next(iter(self._admitted_s.items()))
            if oldest in running or (admitted_s > now_s - REMEMBERED_S and len(self) <= REMEMBERED_REQUESTS):
                break
            del self._admitted_s[oldest]
        if request_id in self._admitted_s:
            raise MeshError(
                Reason.DUPLICATE_REQUEST,
                f"request {request_id} was admitted before; use a new request_id for new rollouts",
            )

    def admit(self, request_id: str, now_s: float) -> None:
        self._admitted_s[request_id] = now_s
