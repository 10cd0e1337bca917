"""Bookmarks of a watch: what a caller has seen is all up to their revision."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from meshrl.core.rpc.watches import with_bookmarks


@dataclass
class Event:
    revision: int
    bookmark: bool = False


def mark(revision: int) -> Event:
    return Event(revision, bookmark=True)


async def test_a_quiet_stream_sends_the_revision_of_its_last_event_and_goes_on() -> None:
    more = asyncio.Event()

    async def events() -> AsyncGenerator[Event, None]:
        yield Event(4)
        await more.wait()
        yield Event(5)

    seen = []
    async for event in with_bookmarks(events(), mark, sent=3, at_once=True, quiet_s=0.01):
        seen.append(event)
        if len(seen) == 4:
            more.set()
    assert seen[:4] == [mark(3), Event(4), mark(4), mark(4)]
    assert [event for event in seen[4:] if event != mark(4)] == [Event(5)]


async def test_without_bookmarks_nothing_but_events_comes_and_closing_ends_the_source() -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[Event, None]:
        try:
            yield Event(1)
            await asyncio.Event().wait()
        finally:
            closed.set()

    watch = with_bookmarks(events(), mark, sent=0, at_once=False, quiet_s=0.0)
    assert await anext(watch) == Event(1)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    await watch.aclose()
    assert closed.is_set()
