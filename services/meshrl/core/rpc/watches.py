"""Watches: streams of events by revision, with bookmarks for callers that ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol, TypeVar


class Revised(Protocol):
    revision: int


Event = TypeVar("Event", bound=Revised)


async def with_bookmarks(
    events: AsyncGenerator[Event, None], bookmark: Callable[[int], Event], *, sent: int, at_once: bool, quiet_s: float
) -> AsyncGenerator[Event, None]:
    """Yields the events, and a bookmark after each `quiet_s` without one (0: never), first of all with `at_once`.

    A bookmark has the revision of the last event, or `sent` before the first.
    """
    if at_once:
        yield bookmark(sent)
    async with aclosing(events) as source:
        while True:
            following = asyncio.ensure_future(anext(source))
            try:
                while not (await asyncio.wait({following}, timeout=quiet_s or None))[0]:
                    yield bookmark(sent)
                event = await following
            except StopAsyncIteration:
                return
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following})
            sent = event.revision
            yield event
